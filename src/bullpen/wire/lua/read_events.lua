--[[ read_events: the events after a given one, with what is needed to notice that some were trimmed unread.

  Why a script: entries, the oldest position and the count of all events ever must be of one instant.
  The count exists from Redis 7.0 on; before, a reader whose last event is gone can only suspect a loss.

  KEYS   1 events
  ARGV   1 after (an entry id; "$" = only tell the newest)   2 count
  Reply  { entries, events ever written up to the newest one (-1 = unknown), entries in the stream, oldest id or "",
           newest id or "" }
]]
local events_key = KEYS[1]
local after, count = ARGV[1], ARGV[2]

local entries = {}
if redis.call("EXISTS", events_key) == 0 then return { entries, 0, 0, "", "" } end
if after ~= "$" then entries = redis.call("XRANGE", events_key, "(" .. after, "+", "COUNT", count) end
local oldest = redis.call("XRANGE", events_key, "-", "+", "COUNT", 1)[1]
local newest = redis.call("XREVRANGE", events_key, "+", "-", "COUNT", 1)[1]
local written = -1
local info = redis.call("XINFO", "STREAM", events_key)
for index = 1, #info, 2 do
  if info[index] == "entries-added" then written = info[index + 1] end
end
return { entries, written, redis.call("XLEN", events_key), oldest and oldest[1] or "", newest and newest[1] or "" }

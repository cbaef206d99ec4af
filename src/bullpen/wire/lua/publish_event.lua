--[[ publish_event: write an event of somebody's own into the queue's stream.

  KEYS   1 events
  ARGV   1 base   2 max_len ("" for the bound of the queue)   3... field, value, ...
  Reply  id of the entry
]]
--#include lib/trim

local events_key = KEYS[1]
local base, max_len = ARGV[1], ARGV[2]
local fields = {}
for place = 3, #ARGV do fields[#fields + 1] = ARGV[place] end

if max_len ~= "" then return redis.call("XADD", events_key, "MAXLEN", "~", max_len, "*", unpack(fields)) end
trim_events(base)
return redis.call("XADD", events_key, "*", unpack(fields))

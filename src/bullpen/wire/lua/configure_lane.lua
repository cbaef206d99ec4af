--[[ configure_lane: change what a lane may do, or what every lane may that says nothing of its own.

  Settings are one field of `meta` per lane, `bplane:<name>` (no name: all others), of six words, each "-" where nothing is said:
  weight   concurrency   rate_max   rate_duration_ms   paused ("1", or until when, in ms)   size.
  What runs already counts against a new limit, and what the old one held back is looked at again.

  KEYS   1 meta   2 running   3 rate   4 size (of the lane)
  ARGV   1 base   2 clock_offset   3 lane ("" = all others)   then the six words, each "" = as it is; paused: "+" and so many ms
  Reply  the six words as they are now
]]
--#include lib/clock
--#include lib/wake
--#include lib/lane_limits

local meta_key, running_key, rate_key, size_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, lane = ARGV[1], ARGV[3]
local field = "bplane:" .. lane
local FIRST, COUNT, PAUSED = 4, 6, 5

local now_ms = server_now(ARGV[2])
local words = {}
for word in string.gmatch(redis.call("HGET", meta_key, field) or "", "%S+") do words[#words + 1] = word end
for index = 1, COUNT do
  local given = ARGV[FIRST + index - 1]
  words[index] = given ~= "" and given or words[index] or "-"
end
if string.sub(words[PAUSED], 1, 1) == "+" then words[PAUSED] = as_text(now_ms + tonumber(words[PAUSED])) end
local until_ms = tonumber(words[PAUSED])
if until_ms and until_ms ~= 1 and until_ms <= now_ms then words[PAUSED] = "-" end
local text = table.concat(words, " ", 1, COUNT)
if string.find(text, "[^- ]") then
  redis.call("HSET", meta_key, field, text)
  redis.call("HSETNX", meta_key, "opts.maxLenEvents", 10000) -- as every queue has it
else
  redis.call("HDEL", meta_key, field)
end
if string.find(table.concat(words, " ", 2, COUNT), "[^- ]") then
  redis.call("HSET", meta_key, "bplanes", "limited")
else
  redis.call("HSETNX", meta_key, "bplanes", "fair")
end
if words[3] == "-" then redis.call("UNLINK", rate_key) end -- what a limit counted goes with it
if words[6] == "-" then redis.call("UNLINK", size_key) end
if words[2] ~= "-" or words[3] ~= "-" then
  for _, job_id in ipairs(redis.call("LRANGE", base .. "active", 0, 9999)) do
    local own = redis.pcall("HGET", base .. job_id, "bplane")
    if type(own) == "string" and (lane == "" or own == lane) then
      local own_key = own == lane and running_key or base .. "bp:running:" .. own
      redis.pcall("ZADD", own_key, "NX", now_ms, job_id)
      redis.pcall("PEXPIRE", own_key, RUNNING_KEY_MS)
    end
  end
end
if lane ~= "" then
  release_held(base, lane, now_ms)
else -- what others hold is looked at by the next take
  for _, holder in ipairs(redis.pcall("ZRANGE", base .. "bp:lanes:held", 0, 999)) do
    redis.pcall("ZADD", base .. "bp:lanes:held", "XX", now_ms, holder)
  end
end
wake(base)
return text

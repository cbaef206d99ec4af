--[[ Store jobs with the commands that other BullMQ clients need to see, and nothing else: no options, no guards.

  KEYS   1 meta   2 id   3 wait   4 marker   5 events
  ARGV   1 base   2 now   3 count   4 name   5 data   6 opts
]]
local base, now, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local meta = redis.call("HMGET", KEYS[1], "paused", "opts.maxLenEvents")
local first = redis.call("INCRBY", KEYS[2], count) - count
redis.call("XTRIM", KEYS[5], "MAXLEN", "~", meta[2] or 10000)
local ids = {}
for index = 1, count do
  local id = first + index
  ids[index] = id
  redis.call("HSET", base .. id, "name", ARGV[4], "data", ARGV[5], "opts", ARGV[6], "timestamp", now, "delay", 0, "priority", 0)
  redis.call("XADD", KEYS[5], "*", "event", "added", "jobId", id, "name", ARGV[4])
  redis.call("XADD", KEYS[5], "*", "event", "waiting", "jobId", id)
end
redis.call("LPUSH", KEYS[3], unpack(ids))
redis.call("ZADD", KEYS[4], 0, "0")
return first

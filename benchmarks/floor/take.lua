--[[ Take jobs with the commands that other BullMQ clients need to see, and nothing else.

  KEYS   1 meta   2 wait   3 active   4 delayed   5 marker   6 events
  ARGV   1 base   2 now   3 count   4 token   5 lock_ms   6 worker
]]
local base, now, count = ARGV[1], ARGV[2], ARGV[3]
redis.call("HMGET", KEYS[1], "paused", "concurrency", "max", "duration")
redis.call("ZRANGEBYSCORE", KEYS[4], 0, now, "LIMIT", 0, 1000)
local ids = redis.call("RPOP", KEYS[2], count)
redis.call("LPUSH", KEYS[3], unpack(ids))
local taken = {}
for index = 1, #ids do
  local key = base .. ids[index]
  local fields = redis.call("HMGET", key, "name", "data", "opts", "timestamp", "atm", "ats", "stc", "parentKey")
  redis.call("SET", key .. ":lock", ARGV[4], "PX", ARGV[5])
  redis.call("HSET", key, "processedOn", now, "ats", (tonumber(fields[6]) or 0) + 1, "pb", ARGV[6])
  redis.call("XADD", KEYS[6], "*", "event", "active", "jobId", ids[index], "prev", "waiting")
  fields[9] = ids[index]
  taken[index] = fields
end
redis.call("ZADD", KEYS[5], 0, "0")
return taken

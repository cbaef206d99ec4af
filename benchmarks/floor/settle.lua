--[[ Complete jobs with the commands that other BullMQ clients need to see, and nothing else.

  KEYS   1 meta   2 active   3 completed   4 stalled   5 events
  ARGV   1 base   2 now   3 value   then ids
]]
local base, now, value = ARGV[1], ARGV[2], ARGV[3]
local locks, children, members, ids = {}, {}, {}, {}
for arg = 4, #ARGV do
  local key = base .. ARGV[arg]
  locks[#locks + 1] = key .. ":lock"
  children[#children + 1] = key .. ":dependencies"
  children[#children + 1] = key .. ":unsuccessful"
  members[#members + 1] = now
  members[#members + 1] = ARGV[arg]
  ids[#ids + 1] = ARGV[arg]
end
redis.call("MGET", unpack(locks))
redis.call("EXISTS", unpack(children))
redis.call("XTRIM", KEYS[5], "MAXLEN", "~", redis.call("HGET", KEYS[1], "opts.maxLenEvents") or 10000)
for index = 1, #ids do
  local key = base .. ids[index]
  local links = redis.call("HMGET", key, "parentKey", "parent", "deid", "atm")
  redis.call("LREM", KEYS[2], -1, ids[index])
  redis.call("HSET", key, "returnvalue", value, "finishedOn", now, "atm", (tonumber(links[4]) or 0) + 1)
  redis.call("XADD", KEYS[5], "*", "event", "completed", "jobId", ids[index], "returnvalue", value, "prev", "active")
end
redis.call("DEL", unpack(locks))
redis.call("SREM", KEYS[4], unpack(ids))
redis.call("ZADD", KEYS[3], unpack(members))
return #ids

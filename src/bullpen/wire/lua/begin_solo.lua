--[[ begin_solo: a job that stalled repeatedly is about to run with nothing else in its process.

  Only a death while alone proves that the job itself kills its worker; jobs that merely ran beside it must not suffer.
  The take that runs alone leaves its number and the stall count; if the very next take finds one stall more, that run died.

  KEYS   1 job   2 lock
  ARGV   1 token   2 attempts_started   3 stalled_count
  Reply  "alone" (run it), "condemned" (it died while alone), or "lost" (the lock is no longer ours)
]]
local job_key, lock_key = KEYS[1], KEYS[2]
local token, attempts_started, stalled_count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if redis.call("GET", lock_key) ~= token then return "lost" end
local earlier = redis.call("HMGET", job_key, "bpsolo", "bpstc")
if tonumber(earlier[1]) == attempts_started - 1 and stalled_count > (tonumber(earlier[2]) or 0) then return "condemned" end
redis.call("HSET", job_key, "bpsolo", attempts_started, "bpstc", stalled_count)
return "alone"

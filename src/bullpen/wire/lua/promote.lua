--[[ promote: let a delayed job run now, at the end of its line.

  KEYS   1 job   2 delayed
  ARGV   1 base   2 job_id
  Reply  0 done, -1 no such job, -3 it is not delayed
]]
--#include lib/trim
--#include lib/wake
--#include lib/places
--#include lib/ready

local job_key, delayed_key = KEYS[1], KEYS[2]
local base, job_id = ARGV[1], ARGV[2]

local fields = redis.call("HMGET", job_key, "name", "priority")
require_places(base)
local was_delayed = redis.call("ZREM", delayed_key, job_id) == 1
if not fields[1] then return -1 end
if not was_delayed then return -3 end
trim_events(base)
redis.call("HSET", job_key, "delay", 0)
place_ready(base, job_id, priority_class(fields[2]), false)
wake(base)
redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", job_id, "prev", "delayed")
return 0

--[[ remove_scheduler: end a job scheduler. Its next job goes too while it waits for its time; one that is in line already, or runs, is
  the last.

  KEYS   1 repeat   2 scheduler   3 delayed   4 meta
  ARGV   1 base   2 scheduler_id
  Reply  1 removed, 0 there was none
]]
--#include lib/trim
--#include lib/remove
--#include lib/iteration_id

local repeat_key, scheduler_key, delayed_key, meta_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, scheduler_id = ARGV[1], ARGV[2]

local slot = redis.call("ZSCORE", repeat_key, scheduler_id)
redis.call("HDEL", meta_key, "bpsched:" .. scheduler_id)
if not slot then return 0 end
local job_id = iteration_id(scheduler_id, tonumber(slot))
if redis.call("ZREM", delayed_key, job_id) == 1 then
  trim_events(base)
  remove_job_keys(base .. job_id)
  redis.pcall("XADD", base .. "events", "*", "event", "removed", "jobId", job_id, "prev", "delayed")
end
redis.call("ZREM", repeat_key, scheduler_id)
redis.call("DEL", scheduler_key)
return 1

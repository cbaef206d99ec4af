--[[ discard_failed: delete a failed job for good. A parent that waited for it goes on without it.

  KEYS   1 job   2 failed
  ARGV   1 base   2 clock_offset   3 job_id   4 attempts_started
  Reply  1 discarded, 0 the job is no longer failed, or failed again
]]
--#include lib/clock
--#include lib/trim
--#include lib/removal

local job_key, failed_key = KEYS[1], KEYS[2]
local base, job_id, attempts_started = ARGV[1], ARGV[3], ARGV[4]
local now_ms = server_now(ARGV[2])

local fields = redis.call("HMGET", job_key, "ats", "parentKey", "deid")
if (fields[1] or "0") ~= attempts_started then return 0 end
if redis.call("ZREM", failed_key, job_id) == 0 then return 0 end
trim_events(base)
delete_job(base, job_id, fields[3])
if fields[2] then on_child_removed(fields[2], job_key, now_ms) end
redis.pcall("XADD", base .. "events", "*", "event", "removed", "jobId", job_id, "prev", "failed")
return 1

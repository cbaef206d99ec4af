--[[ update_progress: store a job's progress and tell listeners.

  KEYS   1 job   2 meta   3 events
  ARGV   1 job_id   2 progress (JSON)
  Reply  0, or -1 when the job does not exist
]]
--#include lib/bound

local job_key, meta_key, events_key = KEYS[1], KEYS[2], KEYS[3]
local job_id, progress = ARGV[1], ARGV[2]

if redis.call("EXISTS", job_key) == 0 then return -1 end
redis.call("HSET", job_key, "progress", progress)
redis.pcall("XADD", events_key, "MAXLEN", "~", stream_bound(redis.call("HGET", meta_key, "opts.maxLenEvents")), "*",
  "event", "progress", "jobId", job_id, "data", progress)
return 0

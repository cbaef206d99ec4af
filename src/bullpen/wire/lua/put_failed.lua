--[[ put_failed: store work that failed elsewhere as a failed job of this queue.

  KEYS   1 job   2 failed   3 meta   4 events
  ARGV   1 clock_offset   2 job_id   3 name   4 data   5 opts   6 timestamp ("" now)   7 finished_on ("" now)   8 attempts_started
         9 attempts_made   10 failed_reason   11 stacktrace (JSON list)   12 version
  Reply  1 stored, 0 it is there already, -3 the id is in use by a job that has not failed
]]
--#include lib/clock

local job_key, failed_key, meta_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local job_id, name, data, opts, timestamp, finished_on = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local attempts_started, attempts_made, reason, stacktrace, version = ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local now = string.format("%.0f", server_now(ARGV[1]))

local is_failed = redis.call("ZSCORE", failed_key, job_id) -- first, because it raises where a write later would
if redis.call("EXISTS", job_key) == 1 then return is_failed and 0 or -3 end
if timestamp == "" then timestamp = now end
if finished_on == "" then finished_on = now end
redis.call("HSET", job_key, "name", name, "data", data, "opts", opts, "timestamp", timestamp, "delay", 0, "priority", 0,
  "ats", attempts_started, "atm", attempts_made, "failedReason", reason, "stacktrace", stacktrace, "processedOn", finished_on,
  "finishedOn", finished_on)
redis.call("ZADD", failed_key, finished_on, job_id)
redis.pcall("HSETNX", meta_key, "version", version)
redis.pcall("HSETNX", meta_key, "opts.maxLenEvents", 10000)
local bound = redis.pcall("HGET", meta_key, "opts.maxLenEvents")
redis.pcall("XADD", events_key, "MAXLEN", "~", type(bound) == "string" and bound or 10000, "*", "event", "failed", "jobId", job_id,
  "failedReason", reason, "prev", "active")
return 1

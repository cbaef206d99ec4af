--[[ read_result: whether a job has finished, and with what.

  KEYS   1 job   2 completed   3 failed
  ARGV   1 job_id
  Reply  { "completed", value } or { "failed", reason, and of a cancelled one what its caller said } or { "pending" } or { "missing" }
]]
--#include lib/cancelled
local job_key, completed_key, failed_key = KEYS[1], KEYS[2], KEYS[3]
local job_id = ARGV[1]

if redis.call("ZSCORE", completed_key, job_id) then
  return { "completed", redis.call("HGET", job_key, "returnvalue") or "null" }
elseif redis.call("ZSCORE", failed_key, job_id) then
  local fields = redis.call("HMGET", job_key, "failedReason", "bpcancel")
  local reason = fields[1] or ""
  return { "failed", reason, was_cancelled(fields[2], reason) and fields[2] or nil }
elseif redis.call("EXISTS", job_key) == 1 then
  return { "pending" }
end
return { "missing" }

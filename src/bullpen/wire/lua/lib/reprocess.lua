--#include lib/ready
--#include lib/take_letter

-- reprocess: put a finished job, which its set no longer lists, back in line as if it had not finished. `ats` is never reset: it
-- fences the writes of earlier runs. Returns what it cost in jobs, or false for an id without a job.
local function reprocess(base, job_id, state, resets_attempts, dead_letter_base)
  local job_key = base .. job_id
  local fields = redis.pcall("HMGET", job_key, "name", "priority", "opts", "parentKey", "bpdl")
  if fields.err or not fields[1] then return false end
  redis.call("HDEL", job_key, "finishedOn", "processedOn", "failedReason", "returnvalue", "defa", "bpdl",
    "bpcancel", "bpsolo", "bpstc", "bpatm", "bpdeaths")
  if resets_attempts then redis.call("HDEL", job_key, "atm", "attemptsMade") end
  local parent_key = fields[4]
  if parent_key then -- it counted the child as done or failed; a parent that has left already is not called back
    local was_counted = redis.pcall("ZREM", parent_key .. ":unsuccessful", job_key) == 1
    was_counted = redis.pcall("HDEL", parent_key .. ":failed", job_key) == 1 or was_counted
    was_counted = redis.pcall("HDEL", parent_key .. ":processed", job_key) == 1 or was_counted
    if was_counted then redis.pcall("SADD", parent_key .. ":dependencies", job_key) end
  end
  local cost = 1
  if fields[5] then cost = cost + take_letter_away(base, dead_letter_base, fields[5]) end
  local readable, opts = pcall(cjson.decode, fields[3] or "{}")
  place_ready(base, job_id, priority_class(fields[2]), readable and type(opts) == "table" and opts.lifo == true)
  redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", job_id, "prev", state)
  return cost
end

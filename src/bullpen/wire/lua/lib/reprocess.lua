-- take_letter_away: delete the dead letter of a job that goes back in line: left behind, it would ask again for a job that may be
-- done by then. Needs lib/leave_line. Returns what it cost in jobs: to take one out of a long list, it is passed up to that place.
local function take_letter_away(dead_letter_base, entry_id)
  local wait_key, cost = dead_letter_base .. "wait", 1
  if redis.call("EXISTS", dead_letter_base .. entry_id) == 0 then return 0 end
  if not redis.call("LPOS", wait_key, entry_id, "RANK", -1, "MAXLEN", 1000) then
    cost = redis.call("LLEN", wait_key) / 1000
  end
  if leave_line(dead_letter_base, wait_key, entry_id) then
    remove_job_keys(dead_letter_base .. entry_id)
    redis.pcall("XADD", dead_letter_base .. "events", "*", "event", "removed", "jobId", entry_id, "prev", "wait")
  end
  return cost
end

-- reprocess: put a finished job, which its set no longer lists, back in line as if it had not finished. `ats` is never reset: it
-- fences the writes of earlier runs. Returns what it cost in jobs, or false for an id without a job.
local function reprocess(base, job_id, state, resets_attempts, dead_letter_base)
  local job_key = base .. job_id
  local fields = redis.pcall("HMGET", job_key, "name", "priority", "opts", "parentKey", "bpdl")
  if fields.err or not fields[1] then return false end
  redis.call("HDEL", job_key, "finishedOn", "processedOn", "failedReason", "returnvalue", "defa", "bpdl",
    "bpsolo", "bpstc", "bpatm", "bpdeaths")
  if resets_attempts then redis.call("HDEL", job_key, "atm", "attemptsMade") end
  local parent_key = fields[4]
  if parent_key then -- it counted the child as done or failed; a parent that has left already is not called back
    local was_counted = redis.call("ZREM", parent_key .. ":unsuccessful", job_key)
      + redis.call("HDEL", parent_key .. ":failed", job_key) + redis.call("HDEL", parent_key .. ":processed", job_key)
    if was_counted > 0 then redis.call("SADD", parent_key .. ":dependencies", job_key) end
  end
  local cost = 1
  if fields[5] then cost = cost + take_letter_away(dead_letter_base, fields[5]) end
  local readable, opts = pcall(cjson.decode, fields[3] or "{}")
  place_ready(base, job_id, priority_class(fields[2]), readable and type(opts) == "table" and opts.lifo == true)
  redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", job_id, "prev", state)
  return cost
end

--#include lib/ready
--#include lib/take_letter
--#include lib/expect_children

-- A finished job goes back in line as if it had not finished. Two steps, for whoever sends back many: a parent is placed when all
-- those that go back with it are its pending children again.

-- rejoin_parent: its parent, which counted the child as done or failed, waits for it again. True when it had counted it.
-- A parent that has left already is not called back.
local function rejoin_parent(parent_key, job_key)
  local was_counted = redis.pcall("ZREM", parent_key .. ":unsuccessful", job_key) == 1
  was_counted = redis.pcall("HDEL", parent_key .. ":failed", job_key) == 1 or was_counted
  was_counted = redis.pcall("HDEL", parent_key .. ":processed", job_key) == 1 or was_counted
  if was_counted then redis.pcall("SADD", parent_key .. ":dependencies", job_key) end
  return was_counted
end

-- place_again: put a job that no state lists in line, or, when children that it needs are pending, where it waits for them.
local function place_again(base, job_id, priority, at_front, state)
  local is_waiting_for_children = expect_children(base, job_id)
  if not is_waiting_for_children then place_ready(base, job_id, priority, at_front) end
  redis.pcall("XADD", base .. "events", "*", "event", is_waiting_for_children and "waiting-children" or "waiting", "jobId", job_id,
    "prev", state)
end

-- forget_outcome: the first step. `ats` is never reset: it fences the writes of earlier runs. Returns what it cost in jobs,
-- and the place in line; or false for an id without a job.
local function forget_outcome(base, job_id, resets_attempts, dead_letter_base)
  local job_key = base .. job_id
  local fields = redis.pcall("HMGET", job_key, "name", "priority", "opts", "parentKey", "bpdl")
  if fields.err or not fields[1] then return false end
  redis.call("HDEL", job_key, "finishedOn", "processedOn", "failedReason", "returnvalue", "defa", "bpdl",
    "bpcancel", "bpsolo", "bpstc", "bpatm", "bpdeaths")
  if resets_attempts then redis.call("HDEL", job_key, "atm", "attemptsMade") end
  if fields[4] then rejoin_parent(fields[4], job_key) end
  local cost = 1
  if fields[5] then cost = cost + take_letter_away(base, dead_letter_base, fields[5]) end
  local readable, opts = pcall(cjson.decode, fields[3] or "{}")
  return cost, { priority_class(fields[2]), readable and type(opts) == "table" and opts.lifo == true }
end

-- reprocess: both steps of one job, which its set no longer lists. False for an id without a job.
local function reprocess(base, job_id, state, resets_attempts, dead_letter_base)
  local cost, place = forget_outcome(base, job_id, resets_attempts, dead_letter_base)
  if not cost then return false end
  place_again(base, job_id, place[1], place[2], state)
  return true
end

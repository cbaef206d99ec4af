--[[ remove: delete a job, and with it the jobs it waits or waited for, as if they had never been.

  All or nothing: while the job or one of its pending descendants runs, nothing is removed. A tree that would take too long in one
  step is refused as well; the caller then removes job by job, the parent first, so that nobody runs it in between.
  A parent of the job loses a child it waited for, and is released when it was the last.
  What a job lists as its children is whatever a producer wrote: only those that name it as their parent are.

  KEYS   1 job
  ARGV   1 base   2 clock_offset   3 job_id   4 with_children ("1" or "")   5 only_unfinished ("1" or "")
         6 parent (the key that the job must name as its parent, or "")
  Reply  1 removed, 0 no such job, -2 it or a descendant is running, -3 it has finished and only_unfinished, -8 a scheduler's current
         iteration, -9 it has another parent, -20 too large for one step
]]
--#include lib/clock
--#include lib/trim
--#include lib/removal
--#include lib/leave_state
--#include lib/record

local job_key = KEYS[1]
local base, job_id, with_children, only_unfinished = ARGV[1], ARGV[3], ARGV[4] == "1", ARGV[5] == "1"
local parent = ARGV[6] ~= "" and ARGV[6]
local now_ms = server_now(ARGV[2])
local MOST_PER_CALL = 1000
local LISTED_LIKE_ONE_JOB = 1000

local spent, refused = 0, nil
local tree = {} -- { key, base, id, parentKey, deid } per job, parents before children
local seen = {}

-- What a job costs: one, and if it must be searched in a list, more with the length of the list.
local function cost_of(job_base, id)
  for _, state in ipairs({ "completed", "failed", "delayed", "prioritized", "waiting-children" }) do
    if redis.call("ZSCORE", job_base .. state, id) then return 1 end
  end
  return 1 + (redis.call("LLEN", job_base .. "active") + redis.call("LLEN", job_base .. "wait")) / LISTED_LIKE_ONE_JOB
end

-- Collects a job and its descendants without writing anything.
local function collect(key, is_pending, own_parent)
  if refused or seen[key] then return end
  local fields = redis.pcall("HMGET", key, "name", "parentKey", "deid")
  if fields.err or not fields[1] or (own_parent and fields[2] ~= own_parent) then return end
  seen[key] = true
  if redis.call("EXISTS", key .. ":lock") == 1 then
    if is_pending then refused = -2 end
    return -- a child that was counted as finished and runs again by itself is left alone
  end
  local own_base, id = split_key(key)
  if key == job_key then own_base, id = base, job_id end -- an id may contain colons
  spent = spent + cost_of(own_base, id)
  if spent > MOST_PER_CALL and #tree > 0 then
    refused = -20
    return
  end
  tree[#tree + 1] = { key, own_base, id, fields[2], fields[3] }
  if not with_children then return end
  local children = redis.call("SCARD", key .. ":dependencies") + redis.call("HLEN", key .. ":processed")
    + redis.call("HLEN", key .. ":failed") + redis.call("ZCARD", key .. ":unsuccessful")
  if children > MOST_PER_CALL then
    refused = -20
    return
  end
  for _, child in ipairs(redis.call("SMEMBERS", key .. ":dependencies")) do collect(child, true, key) end
  for _, child in ipairs(redis.call("HKEYS", key .. ":processed")) do collect(child, false, key) end
  for _, child in ipairs(redis.call("HKEYS", key .. ":failed")) do collect(child, false, key) end
  for _, child in ipairs(redis.call("ZRANGE", key .. ":unsuccessful", 0, -1)) do collect(child, false, key) end
end

if parent and redis.pcall("HGET", job_key, "parentKey") ~= parent then return -9 end
if redis.call("EXISTS", job_key) == 0 then
  leave_state(base, job_id, true) -- an id without a job helps nobody; one in the middle of a long line goes when it is taken
  return 0
end
if is_record(base, job_id) then return 0 end
if only_unfinished and (redis.call("ZSCORE", base .. "failed", job_id) or redis.call("ZSCORE", base .. "completed", job_id)) then
  return -3
end
if is_current_iteration(base, job_id, redis.call("HGET", job_key, "rjk")) then return -8 end
collect(job_key, true)
if refused then return refused end
if #tree == 0 then return 0 end

trim_events(base)
for _, job in ipairs(tree) do
  local key, own_base, id, parent_key, deduplication_id = unpack(job, 1, 5)
  local state = leave_state(own_base, id)
  delete_job(own_base, id, deduplication_id)
  redis.pcall("SREM", own_base .. "stalled", id)
  if parent_key then on_child_removed(parent_key, key, now_ms) end -- finds nothing when the parent went just before
  redis.pcall("XADD", own_base .. "events", "*", "event", "removed", "jobId", id, "prev", state or "unknown")
end
return 1

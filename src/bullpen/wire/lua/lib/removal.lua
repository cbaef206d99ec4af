--#include lib/if_typed
--#include lib/remove
--#include lib/parents

-- What every removal of jobs by hand has in common.

-- is_current_iteration: whether a scheduler's record names this job. Without it the scheduler would never make another.
local function is_current_iteration(base, job_id, scheduler_id)
  if not scheduler_id then return false end
  local slot = if_typed("ZSCORE", base .. "repeat", scheduler_id)
  if not slot then return false end
  local ending = string.format(":%.0f", tonumber(slot)) -- what stands before it depends on the release that made the job
  return string.sub(job_id, 1, 7) == "repeat:" and string.sub(job_id, -#ending) == ending
end

-- delete_job: everything stored under a job that no state lists any more. A deduplication id is freed only by its owner.
local function delete_job(base, job_id, deduplication_id)
  local lane = redis.pcall("HGET", base .. job_id, "bplane")
  if type(lane) == "string" then
    redis.pcall("ZREM", base .. "bp:held:" .. lane, job_id)
    redis.pcall("ZREM", base .. "bp:running:" .. lane, job_id)
    redis.pcall("ZREM", base .. "bp:size:" .. lane, job_id)
  end
  remove_job_keys(base .. job_id)
  if not deduplication_id then return end
  local owner_key = base .. "de:" .. deduplication_id
  if redis.pcall("GET", owner_key) == job_id then redis.call("DEL", owner_key, base .. "dn:" .. deduplication_id) end
end

-- bury_with_parent: a child is gone for good. A parent of the same queue that has no other child goes with it, and so on
-- upwards: it is part of the work that somebody threw away. A parent in another queue is not, and runs without the child.
local function bury_with_parent(base, parent_key, child_key, now_ms)
  if redis.pcall("SREM", parent_key .. ":dependencies", child_key) ~= 1 then return end -- it never knew this child
  if redis.call("SCARD", parent_key .. ":dependencies") > 0 then return end
  local parent_base, parent_id = split_key(parent_key)
  if parent_base ~= base then return release_parent(parent_key, now_ms) end
  local fields = redis.pcall("HMGET", parent_key, "parentKey", "deid")
  if fields.err or redis.pcall("ZREM", base .. "waiting-children", parent_id) ~= 1 then return end
  delete_job(base, parent_id, fields[2])
  redis.pcall("XADD", base .. "events", "*", "event", "removed", "jobId", parent_id, "prev", "waiting-children")
  if fields[1] then bury_with_parent(base, fields[1], parent_key, now_ms) end
end

--#include lib/if_typed
--#include lib/parents

-- A job becomes the child of another.

-- lives: whether a job is there. Nil when nobody can tell: its key is in another slot, of another type or out of our rights.
local function lives(job_key)
  local found = redis.pcall("HEXISTS", job_key, "name")
  if type(found) ~= "table" then return found == 1 end
  return nil
end

-- parent_link: key of the parent that options name, and the `parent` field of its child, with the flag for a failure.
local function parent_link(options)
  local parent = options.parent
  local link = { id = parent.id, queueKey = parent.queue }
  for _, flag in ipairs({ "fpof", "cpof", "idof", "rdof" }) do link[flag] = options[flag] end
  return parent.queue .. ":" .. parent.id, cjson.encode(link)
end

-- may_adopt: whether a stored job is nobody's child, or that of this parent, or of one that is gone.
local function may_adopt(job_key, parent_key)
  local other_key = redis.call("HGET", job_key, "parentKey")
  return not other_key or other_key == parent_key or lives(other_key) == false
end

-- adopt_stored: let the parent wait for a job that is stored already, unless it knows the job. True when it does now.
local function adopt_stored(job_key, parent_key, link)
  if redis.call("HGET", job_key, "parentKey") == parent_key
    and (redis.call("SISMEMBER", parent_key .. ":dependencies", job_key) == 1
      or redis.call("HEXISTS", parent_key .. ":processed", job_key) == 1
      or redis.call("HEXISTS", parent_key .. ":failed", job_key) == 1
      or redis.call("ZSCORE", parent_key .. ":unsuccessful", job_key)) then
    return false
  end
  redis.call("HSET", job_key, "parentKey", parent_key, "parent", link)
  redis.call("SADD", parent_key .. ":dependencies", job_key)
  return true
end

-- settle_adopted: what became of such a job before counts for its parent now; a failure by its policy.
local function settle_adopted(base, job_id, parent_key, link, now_ms)
  local job_key = base .. job_id
  if if_typed("ZSCORE", base .. "completed", job_id) then
    on_child_completed(parent_key, job_key, redis.call("HGET", job_key, "returnvalue") or "null", now_ms)
  elseif if_typed("ZSCORE", base .. "failed", job_id) then
    on_child_failed(parent_key, link, job_key, redis.call("HGET", job_key, "failedReason") or "", now_ms)
  end
end

--#include lib/wake
--#include lib/delayed
--#include lib/duration
--#include lib/due_marker
--#include lib/places
--#include lib/ready

-- What a finished or removed child does to its parent. A parent may live in another queue of the same slot.
-- The key of a parent is whatever a producer wrote: it may be in another slot, out of our rights or of another type. So the
-- first touch of each key is a pcall, and a parent that cannot be reached is left alone; raising here would tear apart
-- the settle of every job in the batch.

-- split_key: "prefix:queue:id" -> "prefix:queue:", "id". An id has one part or three, and a prefix may have colons too: where both
-- are possible, the queue that exists decides.
local function split_key(job_key)
  local base, id = string.match(job_key, "^(.*:)([^:]+)$")
  local shorter, three_parts = string.match(job_key, "^([^:]+:.*:)([^:]+:[^:]*:[^:]+)$")
  if shorter and redis.pcall("EXISTS", base .. "meta") ~= 1 and redis.pcall("EXISTS", shorter .. "meta") == 1 then
    return shorter, three_parts
  end
  return base, id
end

-- release_parent: a parent that waits for children becomes ready, or delayed if it has a delay of its own. Where it cannot be placed
-- it goes on waiting.
local function release_parent(parent_key, now_ms)
  local base, parent_id = split_key(parent_key)
  if not base or missing_later(base) then return end
  local fields = redis.pcall("HMGET", parent_key, "priority", "delay", "name")
  if fields.err or not fields[3] then return end
  if redis.pcall("ZREM", base .. "waiting-children", parent_id) ~= 1 then return end
  local delay_ms = whole_ms(fields[2])
  if delay_ms > 0 then
    place_delayed(base, parent_id, now_ms + delay_ms)
    wake_when_due(base)
  else
    place_ready(base, parent_id, priority_class(fields[1]), true)
    wake(base)
    redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", parent_id, "prev", "waiting-children")
  end
end

-- release_if_none_pending: the last child to leave frees its parent.
local function release_if_none_pending(parent_key, now_ms)
  if redis.pcall("SCARD", parent_key .. ":dependencies") == 0 then release_parent(parent_key, now_ms) end
end

local function on_child_completed(parent_key, child_key, value, now_ms)
  if redis.pcall("SREM", parent_key .. ":dependencies", child_key) == 1 then
    redis.pcall("HSET", parent_key .. ":processed", child_key, value)
    release_if_none_pending(parent_key, now_ms)
  end
end

-- fail_parent: the child's failure condemns the parent: whoever takes it next fails it without running it.
local function fail_parent(parent_key, child_key, now_ms)
  local base, parent_id = split_key(parent_key)
  redis.pcall("ZADD", parent_key .. ":unsuccessful", now_ms, child_key)
  if not base or redis.pcall("HEXISTS", parent_key, "name") ~= 1 then return end
  local reason = "child " .. child_key .. " failed"
  if type(redis.pcall("ZSCORE", base .. "waiting-children", parent_id)) == "string" then
    redis.call("HSET", parent_key, "defa", reason, "delay", 0)
    release_parent(parent_key, now_ms)
  elseif not missing_place(base) and redis.pcall("ZREM", base .. "delayed", parent_id) == 1 then
    redis.call("HSET", parent_key, "defa", reason, "delay", 0)
    place_ready(base, parent_id, priority_class(redis.call("HGET", parent_key, "priority")), true)
    wake(base)
    redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", parent_id, "prev", "delayed")
  elseif type(redis.pcall("ZSCORE", base .. "failed", parent_id)) ~= "string" then
    redis.call("HSET", parent_key, "defa", reason)
  end
end

-- on_child_failed: the policy flag in the child's own `parent` JSON decides; without a flag the parent keeps waiting.
local function on_child_failed(parent_key, parent_json, child_key, reason, now_ms)
  local readable, policy = pcall(cjson.decode, parent_json or "{}")
  if not readable or type(policy) ~= "table" then return end
  local flagged = policy.fpof or policy.cpof or policy.idof or policy.rdof
  if not flagged or redis.pcall("SREM", parent_key .. ":dependencies", child_key) ~= 1 then return end
  if policy.fpof then
    fail_parent(parent_key, child_key, now_ms)
  elseif policy.cpof then
    redis.pcall("HSET", parent_key .. ":failed", child_key, reason)
    release_parent(parent_key, now_ms)
  else
    if policy.idof then redis.pcall("HSET", parent_key .. ":failed", child_key, reason) end
    release_if_none_pending(parent_key, now_ms)
  end
end

-- on_child_removed: a child that is gone is nobody's pending child any more.
local function on_child_removed(parent_key, child_key, now_ms)
  if redis.pcall("SREM", parent_key .. ":dependencies", child_key) == 1 then
    release_if_none_pending(parent_key, now_ms)
  end
end

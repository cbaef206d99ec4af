-- continues_early: whether a child failed whose parent does not wait for the others then.
local function continues_early(job_key)
  for _, child_key in ipairs(redis.pcall("HKEYS", job_key .. ":failed")) do
    local readable, policy = pcall(cjson.decode, redis.pcall("HGET", child_key, "parent"))
    if readable and type(policy) == "table" and policy.cpof then return true end
  end
  return false
end

-- expect_children: let a job that goes back in line wait for the children it needs. True when it waits now; else its place is in line.
-- Beside a failed child it could not complete. So it waits for those as for children without a policy: until they are retried too, or
-- removed. A child that is gone already does not hold it back, and neither does what stands in a key of another type.
local function expect_children(base, job_id)
  local job_key = base .. job_id
  local pending_key, unsuccessful_key = job_key .. ":dependencies", job_key .. ":unsuccessful"
  local known = redis.pcall("EXISTS", pending_key, unsuccessful_key)
  if type(known) ~= "number" or known == 0 or continues_early(job_key) then return false end
  for _, child_key in ipairs(redis.pcall("ZRANGE", unsuccessful_key, 0, -1)) do
    local child = redis.pcall("HMGET", child_key, "parentKey", "failedReason")
    if child[1] == job_key and child[2] and type(redis.pcall("SADD", pending_key, child_key)) == "number" then
      redis.pcall("ZREM", unsuccessful_key, child_key)
    end
  end
  local pending = redis.pcall("SCARD", pending_key)
  if type(pending) ~= "number" or pending == 0 then return false end
  local now = redis.call("TIME")
  if type(redis.pcall("ZADD", base .. "waiting-children", now[1] * 1000 + math.floor(now[2] / 1000), job_id)) ~= "number" then
    return false
  end
  redis.call("HSET", job_key, "delay", 0) -- of its last attempt: it would wait for that once more when it is released
  return true
end

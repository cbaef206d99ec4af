-- state_of: the one state structure that holds the id, by its wire name, or "unknown".
local function state_of(base, job_id)
  for _, state in ipairs({ "completed", "failed", "delayed", "prioritized" }) do
    if redis.call("ZSCORE", base .. state, job_id) then return state end
  end
  if redis.call("LPOS", base .. "active", job_id) then return "active" end
  if redis.call("LPOS", base .. "wait", job_id) then return "waiting" end
  if redis.call("LPOS", base .. "paused", job_id) then return "waiting" end
  if redis.call("ZSCORE", base .. "waiting-children", job_id) then return "waiting-children" end
  return "unknown"
end

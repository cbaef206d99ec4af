-- promote_due: move delayed jobs whose time has come to where workers find them, at most 1000 per call, in due order.
-- Done by every take, also while the queue is paused or limited, so that order and events do not depend on who is awake.
-- `dropped` gets the first ids that have no job, each with its reason. Returns how many were due, and how many of them are jobs.
local function promote_due(base, now_ms, dropped, most)
  local delayed_key, events_key = base .. "delayed", base .. "events"
  local due = redis.call("ZRANGEBYSCORE", delayed_key, 0, (now_ms + 1) * 4096 - 1, "LIMIT", 0, most or 1000)
  if #due == 0 then return 0, 0 end
  redis.call("ZREM", delayed_key, unpack(due))
  local plain, missing = {}, 0
  for _, job_id in ipairs(due) do
    local job_key = base .. job_id
    local fields = redis.pcall("HMGET", job_key, "name", "priority")
    if not fields[1] then -- no name, or no hash at all: an id without a job, dropped here
      missing = missing + 1
      if #dropped < 20 then
        dropped[#dropped + 1] = job_id
        dropped[#dropped + 1] = fields.err and "type" or redis.call("EXISTS", job_key) == 1 and "name" or "gone"
      end
    else
      local priority = priority_class(fields[2])
      if priority ~= 0 then
        place_ready(base, job_id, priority, false)
      else
        plain[#plain + 1] = job_id
      end
      redis.call("HSET", job_key, "delay", 0)
      redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "delayed")
    end
  end
  if #plain > 0 then redis.call("LPUSH", ready_line(base), unpack(plain)) end
  return #due, #due - missing
end

-- place_delayed: put a job into `delayed`, after those already due in the same millisecond, and announce it.
-- score = due ms * 4096 + sequence; numbers go to commands as numbers, since Lua's own text form loses digits.
local function place_delayed(base, job_id, due_ms)
  local key = base .. "delayed"
  local lowest, highest = due_ms * 4096, (due_ms + 1) * 4096 - 1
  local last = redis.call("ZREVRANGEBYSCORE", key, highest, lowest, "WITHSCORES", "LIMIT", 0, 1)
  local score = lowest
  if last[2] then score = math.min(tonumber(last[2]) + 1, highest) end
  redis.call("ZADD", key, score, job_id)
  redis.pcall("XADD", base .. "events", "*", "event", "delayed", "jobId", job_id, "delay", due_ms)
end

-- wake: set the base marker so that one blocked worker looks for jobs, unless the queue is paused or full.
-- The marker is a hint and never worth failing for, hence pcall (a foreign key of the wrong type, memory full).
local function wake(base)
  local meta = redis.pcall("HMGET", base .. "meta", "paused", "concurrency")
  local concurrency = tonumber(meta[2]) -- nil also for what is no number: nobody's limit
  if meta[1] then return end
  local running = concurrency and redis.pcall("LLEN", base .. "active")
  if type(running) == "number" and running >= concurrency then return end
  redis.pcall("ZADD", base .. "marker", 0, "0")
end

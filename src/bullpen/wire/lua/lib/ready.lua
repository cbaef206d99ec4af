-- priority_class: the priority of a stored field. Node accepts negative ones; what is no number, or too large for a score that
-- keeps the order, is 0: a foreign value must not make ZADD fail after the job has left its old place.
local function priority_class(text)
  local priority = math.floor(tonumber(text) or 0)
  if priority ~= priority or math.abs(priority) > 2097151 then return 0 end
  return priority
end

-- place_ready: put a job where workers find it. Needs lib/layout. The hash's priority decides, not the options it was added with.
-- at_front serves jobs that had their turn already (LIFO, given back, released parents); classes of priority have no front
-- except for jobs given back, which pass keep_turn.
local function place_ready(base, job_id, priority, at_front, keep_turn)
  if priority ~= 0 then -- Node accepts negative priorities; they go before all others of the set
    local counter = 0
    if not keep_turn then counter = redis.call("INCR", base .. "pc") % 4294967296 end
    redis.call("ZADD", base .. "prioritized", priority * 4294967296 + counter, job_id)
  elseif at_front then
    redis.call("RPUSH", ready_line(base), job_id)
  else
    redis.call("LPUSH", ready_line(base), job_id)
  end
end

--#include lib/layout
--#include lib/lane_tags

-- priority_class: the priority of a stored field. Node accepts negative ones; what is no number, or too large for a score that
-- keeps the order, is 0: a foreign value must not make ZADD fail after the job has left its old place.
local function priority_class(text)
  local priority = math.floor(tonumber(text) or 0)
  if priority ~= priority or math.abs(priority) > 2097151 then return 0 end
  return priority
end

-- place_ready: put a job where workers find it. The hash's priority decides, not the options it was added with.
-- at_front serves jobs that had their turn already (LIFO, given back, released parents); classes of priority have no front
-- except for jobs given back, which pass keep_turn.
local function place_ready(base, job_id, priority, at_front, keep_turn)
  if priority ~= 0 then -- Node accepts negative priorities; they go before all others of the set
    local lane = not keep_turn and redis.pcall("HGET", base .. job_id, "bplane")
    local score = priority * 4294967296
    if type(lane) == "string" then
      score = lane_score(base, priority, lane)
      keep_lane_tags()
    elseif not keep_turn then
      -- No counter but something else: the job goes to the front of its class. It has left its old place, and must have one.
      local counter = redis.pcall("INCR", base .. "pc")
      if type(counter) == "number" then score = score + counter % 4294967296 end
    end
    redis.call("ZADD", base .. "prioritized", score, job_id)
  elseif at_front then
    redis.call("RPUSH", ready_line(base), job_id)
  else
    redis.call("LPUSH", ready_line(base), job_id)
  end
end

--#include lib/ready

-- promote_due: move delayed jobs whose time has come to where workers find them, at most 1000 per call, in due order.
-- Done by every take, also while the queue is paused or limited, so that order and events do not depend on who is awake.
-- `dropped` gets the first ids that have no job, each with its reason. Returns how many were due, and how many of them are jobs.
-- Raises, with the name of the key, before anything is removed: an id that was removed and cannot be placed would be in no list.
local function promote_due(base, now_ms, dropped, most)
  local delayed_key, prioritized_key, events_key = base .. "delayed", base .. "prioritized", base .. "events"
  local due = redis.call("ZRANGEBYSCORE", delayed_key, "-inf", (now_ms + 1) * 4096 - 1, "LIMIT", 0, most or 1000)
  if #due == 0 then return 0, 0 end
  local line = ready_line(base)
  local jobs, plain, ranked, classes, lanes = {}, {}, {}, {}, nil
  for _, job_id in ipairs(due) do
    local job_key = base .. job_id
    local fields = redis.pcall("HMGET", job_key, "name", "priority", "bplane")
    if fields[1] then
      local priority = priority_class(fields[2])
      jobs[#jobs + 1] = job_id
      if priority ~= 0 then
        ranked[#ranked + 1] = job_id
        classes[#ranked] = priority
        if fields[3] then
          lanes = lanes or {}
          lanes[#ranked] = fields[3]
        end
      else
        plain[#plain + 1] = job_id
      end
    elseif #dropped < 20 then -- no name, or no hash at all: an id without a job, dropped here
      dropped[#dropped + 1] = job_id
      dropped[#dropped + 1] = fields.err and "type" or redis.call("EXISTS", job_key) == 1 and "name" or "gone"
    end
  end
  local length = plain[1] and redis.pcall("LLEN", line)
  if type(length) == "table" then error(length.err .. ": " .. line, 0) end
  length = ranked[1] and redis.pcall("ZCARD", prioritized_key)
  if type(length) == "table" then error(length.err .. ": " .. prioritized_key, 0) end

  redis.call("ZREM", delayed_key, unpack(due)) -- the first write: allowed also when memory is full, and then the others are too
  if ranked[1] then
    local last = redis.pcall("INCRBY", base .. "pc", #ranked)
    if type(last) ~= "number" then last = #ranked end -- no counter but something else: they keep the order among themselves
    local members = {}
    for index, job_id in ipairs(ranked) do
      if lanes and lanes[index] then
        members[2 * index - 1] = lane_score(base, classes[index], lanes[index])
      else
        members[2 * index - 1] = classes[index] * 4294967296 + (last - #ranked + index) % 4294967296
      end
      members[2 * index] = job_id
    end
    if lanes then keep_lane_tags() end
    redis.call("ZADD", prioritized_key, unpack(members))
  end
  if plain[1] then redis.call("LPUSH", line, unpack(plain)) end
  for _, job_id in ipairs(jobs) do
    redis.call("HSET", base .. job_id, "delay", 0)
    redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "delayed")
  end
  return #due, #jobs
end

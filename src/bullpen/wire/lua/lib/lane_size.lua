--#include lib/lane_tags

-- How many jobs a lane may have that did not start. `bp:size:<lane>` lists them, from when such a limit is set: a list and no counter,
-- because other clients take and remove jobs without a word. Our own workers strike off what they start; of the rest those that have
-- been looked at longest ago are looked at again when the lane is full. A key of another type there costs the limit and never a job.
local SIZE_KEY_MS, MOST_LOOKED_AT, LOOKED_AT_FOR_MS = 604800000, 200, 1000

local function lane_has_room(base, lane, at_ms)
  local most = lane_setting(base, lane, 6)
  if not most then return true end
  local key = base .. "bp:size:" .. lane
  local size = redis.pcall("ZCARD", key)
  if type(size) ~= "number" or size < most then return true end
  for _, job_id in ipairs(redis.call("ZRANGEBYSCORE", key, "-inf", at_ms - LOOKED_AT_FOR_MS, "LIMIT", 0, MOST_LOOKED_AT)) do
    if type(redis.pcall("ZSCORE", base .. "prioritized", job_id)) == "string"
      or type(redis.pcall("ZSCORE", base .. "delayed", job_id)) == "string" then
      redis.call("ZADD", key, at_ms, job_id)
    else
      redis.call("ZREM", key, job_id)
      size = size - 1
    end
  end
  return size < most
end

local function count_in_lane(base, lane, job_id, at_ms)
  if not lane_setting(base, lane, 6) then return end
  local key = base .. "bp:size:" .. lane
  redis.pcall("ZADD", key, at_ms, job_id)
  redis.pcall("PEXPIRE", key, SIZE_KEY_MS)
end

--#include lib/if_typed

-- A line is a list of ids: new ones come in on the left, the right end is next to run. It may hold millions, and a search through a
-- million takes 20 to 60 ms; so a long line is looked at where a job is likely to stand.
local LOOK = 5000 -- ids at each end, and around the place that a job should have

-- place_by_age: where a job stands in a line that is in order of creation, as most are: found by halving. Index from the left, or nil.
local function place_by_age(base, line_key, length, job_id)
  local created_ms, number = tonumber(redis.pcall("HGET", base .. job_id, "timestamp")), tonumber(job_id)
  if not created_ms then return nil end
  local newer, older = 0, length - 1
  while older - newer > LOOK do
    local middle = math.floor((newer + older) / 2)
    local other_id = redis.call("LINDEX", line_key, middle)
    local other_ms = tonumber(redis.pcall("HGET", base .. other_id, "timestamp"))
    if not other_ms then return nil end
    -- Thousands may be of one instant; those with generated ids are then in the order of their numbers.
    if other_ms > created_ms or (other_ms == created_ms and number and (tonumber(other_id) or 0) > number) then
      newer = middle
    else
      older = middle
    end
  end
  local first = math.max(0, newer - LOOK / 4)
  for offset, id in ipairs(redis.call("LRANGE", line_key, first, older + LOOK / 4)) do
    if id == job_id then return first + offset - 1 end
  end
  return nil
end

-- find_in_line: index of a job from the left, or nil; and whether that is certain, since a long line is not searched everywhere.
local function find_in_line(base, line_key, job_id)
  local length = if_typed("LLEN", line_key)
  if not length then return nil, true end
  if length <= 2 * LOOK then return redis.call("LPOS", line_key, job_id) or nil, true end
  local index = redis.call("LPOS", line_key, job_id, "RANK", -1, "MAXLEN", LOOK)
    or redis.call("LPOS", line_key, job_id, "MAXLEN", LOOK) or place_by_age(base, line_key, length, job_id)
  return index, index ~= nil
end

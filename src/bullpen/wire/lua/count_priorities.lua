--[[ count_priorities: how many jobs wait in each class of priority that has any.

  Jumps from class to class, so the work depends on the number of classes and not of jobs; the caller goes on after the last one.

  KEYS   1 prioritized
  ARGV   1 after (a class; "" = from the first)
  Reply  { class, count, … }, at most 1000 classes
]]
local prioritized_key = KEYS[1]
local after = tonumber(ARGV[1])
local SPAN, MOST_PER_CALL, HIGHEST = 4294967296, 1000, 2097151

local counts = {}
local from, before = -HIGHEST * SPAN, string.format("(%.0f", (HIGHEST + 1) * SPAN) -- a score beyond is of no class, and has no next one
if after then from = (after + 1) * SPAN end
while #counts < 2 * MOST_PER_CALL do
  local next_job = redis.call("ZRANGEBYSCORE", prioritized_key, from, before, "WITHSCORES", "LIMIT", 0, 1)
  if not next_job[2] then break end
  local class = math.floor(tonumber(next_job[2]) / SPAN)
  counts[#counts + 1] = class
  counts[#counts + 1] = redis.call("ZCOUNT", prioritized_key, class * SPAN, (class + 1) * SPAN - 1)
  from = (class + 1) * SPAN
end
return counts

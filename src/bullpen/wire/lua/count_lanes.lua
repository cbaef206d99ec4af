--[[ count_lanes: how many jobs of each lane a part of one structure holds.

  KEYS   1 state_key
  ARGV   1 base   2 is_list ("1" or "")   3 start   4 count
  Reply  { how many jobs were looked at, { lane ("" = none), number, … } }
]]
local state_key = KEYS[1]
local base, is_list, start, count = ARGV[1], ARGV[2] == "1", tonumber(ARGV[3]), tonumber(ARGV[4])

local ids = redis.call(is_list and "LRANGE" or "ZRANGE", state_key, start, start + count - 1)
local counts = {}
for _, job_id in ipairs(ids) do
  local lane = redis.pcall("HGET", base .. job_id, "bplane")
  if type(lane) ~= "string" then lane = "" end
  counts[lane] = (counts[lane] or 0) + 1
end
local flat = {}
for lane, number in pairs(counts) do
  flat[#flat + 1] = lane
  flat[#flat + 1] = number
end
return { #ids, flat }

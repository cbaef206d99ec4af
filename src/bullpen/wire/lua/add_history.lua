--[[ add_history: add what jobs did since the last call to the counts of the present minutes, quarter of an hour and hour.

  Why a script: many processes add to the same counts, which are packed so that they take little memory.

  KEYS   1 minutes   2 quarters   3 hours   hashes by name of the job ("" for all): a map of slots, each a list of pairs
  ARGV   1 minute_slot   2 minute_ttl_s   3 quarter_slot   4 quarter_ttl_s   5 hour_slot   6 hour_ttl_s   7 most_names
         then a name and its packed pairs (number of a count, how much to add), for each name
  Reply  how many names there are in the hour
]]
local keys = { KEYS[1], KEYS[2], KEYS[3] }
local slots = { ARGV[1], ARGV[3], ARGV[5] }
local ttls_s = { tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[6]) }
local most_names = tonumber(ARGV[7])
local FIRST_NAME = 8

local function unpacked(raw)
  if not raw then return {} end
  local is_read, found = pcall(cmsgpack.unpack, raw)
  if not is_read or type(found) ~= "table" then return {} end -- somebody else's: begin anew
  return found
end

local function add(counts, pairs_to_add)
  local place = {}
  for index = 1, #counts, 2 do place[counts[index]] = index + 1 end
  for index = 1, #pairs_to_add, 2 do
    local count, more = pairs_to_add[index], pairs_to_add[index + 1]
    if place[count] then
      counts[place[count]] = counts[place[count]] + more
    else
      counts[#counts + 1] = count
      counts[#counts + 1] = more
    end
  end
  return counts
end

for tier = 1, 3 do
  local key, slot = keys[tier], slots[tier]
  for index = FIRST_NAME, #ARGV, 2 do
    local name = ARGV[index]
    local raw = redis.call("HGET", key, name)
    -- Whoever puts an id into the name of a job must not fill the server.
    if not raw and name ~= "" and redis.call("HLEN", key) >= most_names then
      name = "other"
      raw = redis.call("HGET", key, name)
    end
    local by_slot = unpacked(raw)
    by_slot[slot] = add(type(by_slot[slot]) == "table" and by_slot[slot] or {}, unpacked(ARGV[index + 1]))
    redis.call("HSET", key, name, cmsgpack.pack(by_slot))
  end
  redis.call("EXPIRE", key, ttls_s[tier])
end
return redis.call("HLEN", keys[3])

--[[ read_sample: of many jobs what tells whether they can run, in one call.

  Why a script: whoever looks after hundreds of queues asks each for its first hundred jobs, and payloads may have megabytes.

  KEYS   1 meta (names the queue's place; not read)
  ARGV   1 base   2 most_bytes (longer data is left out)   then job ids
  Reply  per id the values of name, data, timestamp, delay, opts; data is false where it is too long; or one text, why no job is
         there: "gone", "name" (a hash without one), "type" (no hash)
]]
local _meta_key = KEYS[1] -- luacheck: ignore 211
local base, most_bytes = ARGV[1], tonumber(ARGV[2])
local FIRST_ID = 3

local found = {}
for arg = FIRST_ID, #ARGV do
  local key = base .. ARGV[arg]
  local fields = redis.pcall("HMGET", key, "name", "data", "timestamp", "delay", "opts")
  if fields.err then
    fields = string.find(fields.err, "WRONGTYPE", 1, true) and "type" or redis.call("HMGET", key, "name")
  elseif not fields[1] then
    fields = redis.call("EXISTS", key) == 1 and "name" or "gone"
  elseif fields[2] and #fields[2] > most_bytes then
    fields[2] = false
  end
  found[#found + 1] = fields
end
return found

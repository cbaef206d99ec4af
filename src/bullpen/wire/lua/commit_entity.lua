--[[ commit_entity: store what one event did to an entity: its data, its past, and that the event counts.

  Why a script: the version check and all writes must be one step, or two events both change what they have read.

  KEYS   1 entity    hash: data (JSON), version, tenant (whose it is; without one it is everybody's)
         2 applied   sorted set of event keys, scored by the version they led to
         3 outcomes  hash: event key -> reason, only of events that parked the entity
         4 history   list of JSON, newest last
  ARGV   1 version   the one that was read; 0 makes the entity
         2 data
         3 keep_applied
         4 keep_history
         5 is_failed
         6 reason
         7 key_count
         8 tenant    who changes it, or ""; whoever makes an entity owns it
         then per event key: the key; then per entry of the past: its JSON
  Reply  the new version, or -1 when the version is not the present one, or the entity another tenant's
  Error  WRONGTYPE when somebody else's value lies at one of the keys; nothing was written
]]
local entity_key, applied_key, outcomes_key, history_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local version, data, keep_applied, keep_history = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local is_failed, reason, key_count, tenant = ARGV[5] == "1", ARGV[6], tonumber(ARGV[7]), ARGV[8]

local present = redis.call("HMGET", entity_key, "version", "tenant")
if (present[1] or "0") ~= version or (present[2] and present[2] ~= tenant) then return -1 end
-- Before the first write: an entity that is changed without its event would be changed again when the event comes again.
for i, kind in ipairs({ "zset", "hash", "list" }) do
  local found = redis.call("TYPE", KEYS[i + 1]).ok
  if found ~= "none" and found ~= kind then
    return redis.error_reply("WRONGTYPE " .. KEYS[i + 1] .. " is a " .. found .. ", not a " .. kind)
  end
end
local next_version = tonumber(version) + 1
redis.call("HSET", entity_key, "data", data, "version", next_version)
if version == "0" and tenant ~= "" then redis.call("HSET", entity_key, "tenant", tenant) end
for i = 9, 8 + key_count do
  redis.call("ZADD", applied_key, next_version, ARGV[i])
  if is_failed then
    redis.call("HSET", outcomes_key, ARGV[i], reason)
  else
    redis.call("HDEL", outcomes_key, ARGV[i])
  end
end
-- At most 1000 at once, which Lua can unpack: after keep_applied was lowered the rest goes with the next events.
local surplus = math.min(redis.call("ZCARD", applied_key) - keep_applied, 1000)
if surplus > 0 then
  local oldest = redis.call("ZRANGE", applied_key, 0, surplus - 1)
  redis.call("ZREM", applied_key, unpack(oldest))
  redis.call("HDEL", outcomes_key, unpack(oldest))
end
for i = 9 + key_count, #ARGV do
  redis.call("RPUSH", history_key, ARGV[i])
end
redis.call("LTRIM", history_key, -keep_history, -1)
return next_version

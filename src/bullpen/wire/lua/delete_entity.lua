--[[ delete_entity: forget an entity with its past, unless it is another tenant's.

  Why a script: between a look at the owner and the deletion, the entity could be deleted and made again by somebody else.

  KEYS   1 entity   2 applied   3 outcomes   4 history
  ARGV   1 tenant   who asks, or ""
  Reply  1 deleted, 0 there is none, or none of this tenant
]]
local entity_key, applied_key, outcomes_key, history_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local tenant = ARGV[1]

local owner = redis.call("HGET", entity_key, "tenant")
if owner and owner ~= tenant then return 0 end
return redis.call("DEL", entity_key, applied_key, outcomes_key, history_key) > 0 and 1 or 0

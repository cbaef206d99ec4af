--[[ forget_lanes: delete keys of lanes of a queue that has none any more.

  Why a script: an add with a lane may come between looking and deleting.

  KEYS   1 meta
  ARGV   the keys, all of this queue
  Reply  how many were deleted; 0 when the queue has lanes
]]
local meta_key = KEYS[1]

if redis.call("HEXISTS", meta_key, "bplanes") == 1 then return 0 end
return redis.call("UNLINK", unpack(ARGV))

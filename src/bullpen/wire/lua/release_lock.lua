--[[ release_lock: give back a lock, if it is still ours.

  KEYS   1 lock
  ARGV   1 token
  Reply  1 given back, 0 it was somebody else's or nobody's
]]
local lock_key = KEYS[1]
local token = ARGV[1]

if redis.call("GET", lock_key) ~= token then return 0 end
return redis.call("DEL", lock_key)

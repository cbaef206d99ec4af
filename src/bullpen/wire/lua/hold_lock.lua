--[[ hold_lock: take a lock that is free, or renew the one we have.

  Why a script: asking whose it is and renewing it must be one step, or the lock of the next holder is renewed by us.

  KEYS   1 lock
  ARGV   1 token   2 lease_ms
  Reply  1 it is ours, 0 somebody else has it
]]
local lock_key = KEYS[1]
local token, lease_ms = ARGV[1], ARGV[2]

local holder = redis.call("GET", lock_key)
if holder and holder ~= token then return 0 end
redis.call("SET", lock_key, token, "PX", lease_ms)
return 1

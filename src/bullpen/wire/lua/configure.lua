--[[ configure: set or remove limits of a whole queue, and wake a worker if they may let it go on.

  KEYS   1 meta   2 limiter   3 wait   4 prioritized
  ARGV   1 base   2 lifts_limit ("1": also end the current pause)   then per field: name   value ("" = remove it)
  Reply  1
]]
--#include lib/wake

local meta_key, limiter_key, wait_key, prioritized_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, lifts_limit = ARGV[1], ARGV[2] == "1"

for arg = 3, #ARGV, 2 do
  if ARGV[arg + 1] == "" then
    redis.call("HDEL", meta_key, ARGV[arg])
  else
    redis.call("HSET", meta_key, ARGV[arg], ARGV[arg + 1])
  end
end
if lifts_limit then redis.call("DEL", limiter_key) end
if redis.call("EXISTS", wait_key, prioritized_key) > 0 then wake(base) end
return 1

--[[ configure: set or remove limits of a whole queue, and wake workers if they may go on.

  A worker that waits for the end of a limit does not read the marker, which stays set all the while. It reads the stream of changes.

  KEYS   1 meta   2 limiter   3 wait   4 prioritized   5 limits_changed
  ARGV   1 base   2 pause_ms ("": as it is, "0": end the current pause or window, else no job starts for so long)
         then per field: name   value ("" = remove it)
  Reply  1
]]
--#include lib/wake

local meta_key, limiter_key, wait_key, prioritized_key, limits_changed_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local base, pause_ms = ARGV[1], ARGV[2]
local MANUAL_LIMIT = 9007199254740991
local NEWS_MS = 60000 -- nobody waits longer for one without looking

for arg = 3, #ARGV, 2 do
  if ARGV[arg + 1] == "" then
    redis.call("HDEL", meta_key, ARGV[arg])
  else
    redis.call("HSET", meta_key, ARGV[arg], ARGV[arg + 1])
  end
end
if pause_ms == "0" then
  redis.call("DEL", limiter_key)
elseif pause_ms ~= "" then
  redis.call("SET", limiter_key, MANUAL_LIMIT, "PX", pause_ms)
end
-- Like the marker a hint, and never worth failing for.
redis.pcall("XADD", limits_changed_key, "MAXLEN", 1, "*", "changed", 1)
redis.pcall("PEXPIRE", limits_changed_key, NEWS_MS)
if redis.call("EXISTS", wait_key, prioritized_key) > 0 then wake(base) end
return 1

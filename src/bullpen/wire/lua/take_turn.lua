--[[ take_turn: count one call of a provider, if its window has room.

  Why a script: counting and setting the end of the window must be one step, or a crash in between leaves a window without end.

  KEYS   1 turns   counter of the calls in the current window
  ARGV   1 most   2 window_ms
  Reply  0 the call may go, else the ms until the window ends
]]
local turns_key = KEYS[1]
local most, window_ms = tonumber(ARGV[1]), tonumber(ARGV[2])

local used = tonumber(redis.call("GET", turns_key) or "0") or 0
if used >= most then
  local left_ms = redis.call("PTTL", turns_key)
  if left_ms > 0 then return left_ms end
  used = 0 -- a counter without end is nobody's: begin anew
end
if used == 0 then
  redis.call("SET", turns_key, 1, "PX", window_ms)
else
  redis.call("INCR", turns_key)
end
return 0

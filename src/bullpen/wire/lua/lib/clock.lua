-- server_now: the server's time in ms, moved by the offset of the test clock (0 outside tests).
-- Time is never the client's: two workers with different clocks must agree on what is due.
local function server_now(offset_ms)
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000) + offset_ms
end

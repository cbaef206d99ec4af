-- server_now: the server's time in ms, moved by the offset of the test clock (0 outside tests); and the same as text, since handing
-- a number to a command formats it each time. It is cut out of the reply: formatting it costs three times as much.
-- Time is never the client's: two workers with different clocks must agree on what is due.
local function server_now(offset_ms)
  local time = redis.call("TIME")
  local text = time[1] .. string.sub("00000" .. time[2], -6, -4)
  if offset_ms == "0" then return tonumber(text), text end
  local now_ms = text + offset_ms
  return now_ms, string.format("%.0f", now_ms)
end

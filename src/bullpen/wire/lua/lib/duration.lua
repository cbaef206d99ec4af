-- whole_ms: a duration of stored options; what no command takes is none.
local function whole_ms(value)
  local ms = tonumber(value) or 0
  return ms > 0 and ms <= 9007199254740 and math.floor(ms) or 0
end

-- stream_bound: how many events a queue's stream keeps, from its meta field. What is no such number is the default: handed
-- on as it is, it would make every command that trims fail, and with it every add.
local function stream_bound(text)
  if text == "10000" then return text end -- nearly always, and much cheaper than to read and write a number
  local bound = tonumber(text)
  if bound and bound >= 0 and bound <= 9007199254740991 then return math.floor(bound) end
  return 10000
end

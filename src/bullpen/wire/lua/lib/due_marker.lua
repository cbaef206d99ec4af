-- wake_when_due: set the delay marker to the earliest due time, so that blocked workers know how long to sleep.
local function wake_when_due(base)
  local first = redis.call("ZRANGE", base .. "delayed", 0, 0, "WITHSCORES")
  if first[2] then redis.pcall("ZADD", base .. "marker", math.floor(tonumber(first[2]) / 4096), "1") end
end

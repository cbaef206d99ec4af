-- wake_when_due: set the delay marker to the earliest due time, so that blocked workers know how long to sleep. Anybody may have
-- written the score: what is below zero is due at once, and for what is no time at all (too large, infinite) nobody is told to wait.
local function wake_when_due(base)
  local first = redis.pcall("ZRANGE", base .. "delayed", 0, 0, "WITHSCORES")
  local due_ms = first[2] and math.floor(math.max(0, tonumber(first[2])) / 4096)
  if due_ms and due_ms < 9007199254740992 then redis.pcall("ZADD", base .. "marker", due_ms, "1") end
end

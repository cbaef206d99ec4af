-- trim_events: keep the event stream within its bound, before a script adds to it: trimmed after, it could lose its own.
local function trim_events(base)
  local bound = redis.pcall("HGET", base .. "meta", "opts.maxLenEvents")
  redis.pcall("XTRIM", base .. "events", "MAXLEN", "~", type(bound) == "string" and bound or 10000)
end

-- trim_events: keep the event stream within its bound, before a script adds to it: trimmed after, it could lose its own.
local function trim_events(base)
  redis.pcall("XTRIM", base .. "events", "MAXLEN", "~", redis.call("HGET", base .. "meta", "opts.maxLenEvents") or 10000)
end

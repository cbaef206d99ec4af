--#include lib/wake
--#include lib/letter_index

-- store_letter: put an entry into a dead-letter queue, an ordinary queue whose name and place any BullMQ client can read. Returns
-- false, with nothing left behind, when keys of that queue have another type.
local function store_letter(letter_base, entry_id, name, data, opts, facts, now_ms)
  local entry_key, meta_key, events_key = letter_base .. entry_id, letter_base .. "meta", letter_base .. "events"
  redis.call("HSET", entry_key, "name", name, "data", data, "opts", opts, "timestamp", now_ms, "delay", 0, "priority", 0)
  if type(redis.pcall("LPUSH", letter_base .. "wait", entry_id)) ~= "number" then
    redis.call("DEL", entry_key)
    return false
  end
  redis.pcall("HSETNX", meta_key, "opts.maxLenEvents", 10000)
  local bound = redis.pcall("HGET", meta_key, "opts.maxLenEvents")
  redis.pcall("XADD", events_key, "MAXLEN", "~", type(bound) == "string" and bound or 10000, "*", "event", "added",
    "jobId", entry_id, "name", name)
  redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", entry_id)
  pcall(wake, letter_base)
  pcall(index_letter, letter_base, entry_id, facts)
  return true
end

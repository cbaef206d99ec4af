--#include lib/parents
--#include lib/duration

-- follow_up_parent: the key of the parent that the follow-up may be a child of, or nil. The stored key is whatever a producer
-- wrote, and may belong to somebody whose keys he may not write: a parent of this queue is his own; one of another queue
-- gets a child only while it waits and has none, since nobody else would release it then.
local function follow_up_parent(base, parent_key)
  if not parent_key or redis.pcall("HEXISTS", parent_key, "name") ~= 1 then return nil end
  if string.sub(parent_key, 1, #base) == base then return parent_key end
  local parent_base, parent_id = split_key(parent_key)
  if not parent_base or type(redis.pcall("ZSCORE", parent_base .. "waiting-children", parent_id)) ~= "string" then return nil end
  return redis.pcall("SCARD", parent_key .. ":dependencies") == 0 and parent_key or nil
end

-- finish_deduplication: the owner of a deduplication id has finished. Free the id (unless a TTL does that), and create the
-- job that was stored to follow it, in the same script, so that the last request is never lost.
local function finish_deduplication(base, deduplication_id, job_id, now_ms)
  local owner_key, next_key = base .. "de:" .. deduplication_id, base .. "dn:" .. deduplication_id
  local owner = redis.pcall("GET", owner_key) -- pcall: an id that a producer made up may meet a key of another type
  if owner and owner ~= job_id then return end
  local stored = redis.pcall("HMGET", next_key, "name", "data", "opts", "jid", "pk", "pd", "rjk")
  local frees_it = owner and redis.call("PTTL", owner_key) == -1
  if not stored.err and stored[1] then require_all_places(base) end -- raises before anything is written
  if frees_it then redis.call("DEL", owner_key) end
  if stored.err or not stored[1] then return end

  local readable, opts = pcall(cjson.decode, stored[3] or "{}")
  if not readable or type(opts) ~= "table" then opts = {} end
  -- No counter but something else: the job gets an id of its time. Its owner has left `active` already.
  local counter = redis.pcall("INCR", base .. "id")
  local number = type(counter) == "number" and tostring(counter) or "at-" .. string.format("%.0f", now_ms)
  local next_id = stored[4] or number
  local job_key = base .. next_id
  local delay_ms, priority = whole_ms(opts.delay), priority_class(opts.priority)
  if opts.bpat then delay_ms = whole_ms((tonumber(opts.bpat) or 0) - now_ms) end
  -- A kept job with the same custom id would be in two states at once; the follow-up then gets a number of its own.
  if redis.call("EXISTS", job_key) == 1 then
    next_id = number
    job_key = base .. next_id
  end
  redis.call("HSET", job_key, "name", stored[1], "data", stored[2] or "{}", "opts", stored[3] or "{}", "timestamp", now_ms,
    "delay", delay_ms, "priority", priority, "deid", deduplication_id)
  name_lane(base, next_id, stored[3])
  if stored[5] then redis.call("HSET", job_key, "parentKey", stored[5]) end
  if stored[6] then redis.call("HSET", job_key, "parent", stored[6]) end
  if stored[7] then redis.call("HSET", job_key, "rjk", stored[7]) end
  local keep_last = type(opts.de) == "table" and opts.de.keepLastIfActive
  local ttl_ms = type(opts.de) == "table" and whole_ms(opts.de.ttl) or 0
  if ttl_ms > 0 and not keep_last then
    redis.call("SET", owner_key, next_id, "PX", ttl_ms)
  else
    redis.call("SET", owner_key, next_id)
  end
  redis.pcall("XADD", base .. "events", "*", "event", "added", "jobId", next_id, "name", stored[1])
  if delay_ms > 0 then
    place_delayed(base, next_id, now_ms + delay_ms)
    wake_when_due(base)
  else
    place_ready(base, next_id, priority, opts.lifo == true)
    wake(base)
    redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", next_id)
  end
  local parent_key = follow_up_parent(base, stored[5])
  if parent_key then redis.pcall("SADD", parent_key .. ":dependencies", job_key) end
  redis.call("DEL", next_key)
end

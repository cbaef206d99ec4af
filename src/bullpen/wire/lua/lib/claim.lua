--#include lib/remove
--#include lib/delayed
--#include lib/duration

-- claim: whether a new job may be stored under its deduplication id; it owns the id then.
-- In: the rule of the job's options (`de`), and the job as a table: id, name, data, opts, delay_ms. Out: nil when
-- it may, else the id of the owner that stands in its way; and whether a delayed job was put elsewhere, so that the marker is stale.
local function claim(base, rule, job, from_ms)
  local owner_key, next_key = base .. "de:" .. rule.id, base .. "dn:" .. rule.id
  local keeps_last = rule.keepLastIfActive
  local ttl_ms = keeps_last and 0 or whole_ms(rule.ttl) -- while a follow-up may be stored the id must not expire
  local function own(keeps_ttl)
    if ttl_ms == 0 then
      redis.call("SET", owner_key, job.id)
    elseif keeps_ttl then
      redis.call("SET", owner_key, job.id, "KEEPTTL")
    else
      redis.call("SET", owner_key, job.id, "PX", ttl_ms)
    end
  end
  local function say(job_id, other_id)
    redis.pcall("XADD", base .. "events", "*", "event", "deduplicated", "jobId", job_id, "deduplicationId", rule.id,
      "deduplicatedJobId", other_id)
  end

  local owner = redis.pcall("GET", owner_key) -- pcall: a foreign key of another type is nobody's claim
  if type(owner) ~= "string" then return own() end
  if rule.replace and redis.call("ZREM", base .. "delayed", owner) == 1 then
    remove_job_keys(base .. owner)
    redis.pcall("XADD", base .. "events", "*", "event", "removed", "jobId", owner, "prev", "delayed")
    say(job.id, owner)
    redis.call("DEL", next_key)
    own(not rule.extend)
    return nil, true
  end
  -- An id without a TTL whose owner is gone would be taken for ever.
  if redis.call("PTTL", owner_key) == -1 and redis.call("EXISTS", base .. owner) == 0 then
    redis.call("DEL", next_key)
    return own()
  end
  if keeps_last and redis.call("LPOS", base .. "active", owner) then
    redis.call("DEL", next_key) -- the last request wins, with all its fields
    redis.call("HSET", next_key, "name", job.name, "data", job.data, "opts", job.opts, "jid", job.id)
    redis.call("PERSIST", owner_key)
    say(owner, job.id)
    return owner
  end
  if rule.replace then return owner end -- Node says nothing in this case
  if rule.extend and ttl_ms > 0 then redis.call("PEXPIRE", owner_key, ttl_ms) end
  say(owner, job.id)
  if rule.reschedule and redis.call("ZREM", base .. "delayed", owner) == 1 then
    redis.call("HSET", base .. owner, "delay", job.delay_ms)
    place_delayed(base, owner, from_ms + job.delay_ms)
    return owner, true
  end
  return owner
end

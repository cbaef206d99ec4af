--[[ advance_scheduler: a worker took an iteration of a job scheduler; store the next one before this one runs.

  Only the iteration that the scheduler's record names may advance it, so that retries and duplicates do not do it twice.
  For `every` the time is computed here; for cron patterns the client sends it.

  KEYS   1 repeat   2 scheduler   3 id   4 events
  ARGV   1 base   2 clock_offset   3 scheduler_id   4 job_id   5 pattern_next_ms ("" = use the record's `every`)
         6 opts (of the iteration that was taken)
  Reply  id of the next iteration, or "" when there is none to store
]]
--#include lib/clock
--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/ready

local repeat_key, scheduler_key, id_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, scheduler_id, job_id = ARGV[1], ARGV[3], ARGV[4]
local now_ms = server_now(ARGV[2])

local slot = redis.call("ZSCORE", repeat_key, scheduler_id)
if not slot then return "" end
slot = tonumber(slot)
if job_id ~= "repeat:" .. scheduler_id .. ":" .. string.format("%.0f", slot) then return "" end

local fields = redis.call("HMGET", scheduler_key, "ic", "every", "limit", "endDate", "offset", "name", "data")
local iteration = (tonumber(fields[1]) or 0) + 1
if not fields[1] or (fields[3] and iteration > tonumber(fields[3])) then return "" end
if fields[4] and now_ms > tonumber(fields[4]) then return "" end

local next_ms
if ARGV[5] ~= "" then
  next_ms = math.max(tonumber(ARGV[5]), now_ms)
else
  local every, offset = tonumber(fields[2]), tonumber(fields[5]) or 0
  if not every or every <= 0 then return "" end
  next_ms = slot + every
  if next_ms < now_ms then -- missed iterations are skipped, not replayed
    next_ms = math.floor(now_ms / every) * every + offset
    if next_ms <= now_ms then next_ms = next_ms + every end
  end
end

local next_id = "repeat:" .. scheduler_id .. ":" .. string.format("%.0f", next_ms)
local job_key = base .. next_id
if redis.call("EXISTS", job_key) == 1 then
  redis.call("XADD", events_key, "*", "event", "duplicated", "jobId", next_id)
  return next_id
end
local delay_ms = math.max(0, next_ms - now_ms)
redis.call("INCR", id_key)
redis.call("ZADD", repeat_key, next_ms, scheduler_id)
redis.call("HINCRBY", scheduler_key, "ic", 1)
local readable, opts = pcall(cjson.decode, ARGV[6])
if not readable or type(opts) ~= "table" then opts = {} end
if type(opts["repeat"]) ~= "table" then opts["repeat"] = {} end
opts["repeat"].count = iteration
opts.jobId, opts.delay, opts.timestamp, opts.repeatJobKey = next_id, delay_ms, now_ms, scheduler_id
if ARGV[5] ~= "" then opts.prevMillis = next_ms end
local priority = priority_class(opts.priority)
redis.call("HSET", job_key, "name", fields[6] or "", "data", fields[7] or "{}", "opts", cjson.encode(opts),
  "timestamp", now_ms, "delay", delay_ms, "priority", priority, "rjk", scheduler_id)
redis.call("XADD", events_key, "*", "event", "added", "jobId", next_id, "name", fields[6] or "")
if delay_ms > 0 then
  place_delayed(base, next_id, now_ms + delay_ms)
  wake_when_due(base)
else
  place_ready(base, next_id, priority, opts.lifo == true)
  wake(base)
  redis.call("XADD", events_key, "*", "event", "waiting", "jobId", next_id)
end
return next_id

--[[ advance_scheduler: a worker took an iteration of a job scheduler; store the next one before this one runs.

  Only the iteration that the scheduler's record names may advance it, so that retries and duplicates do not do it twice.
  For `every` the time is computed here; for cron patterns the client sends it.
  What the record leaves out (older clients write half of it, or none) is taken from the job that was taken.

  KEYS   1 repeat   2 scheduler   3 id   4 events
  ARGV   1 base   2 clock_offset   3 scheduler_id   4 job_id   5 pattern_next_ms ("" = by `every`)
         and of the iteration that was taken: 6 opts   7 name   8 data   9 every   10 offset   11 limit   12 end_ms ("" = none)
  Reply  id of the next iteration, or "" when there is none to store
]]
--#include lib/clock
--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/layout
--#include lib/ready

local repeat_key, scheduler_key, id_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, scheduler_id, job_id = ARGV[1], ARGV[3], ARGV[4]
local now_ms = server_now(ARGV[2])

local slot = redis.call("ZSCORE", repeat_key, scheduler_id)
if not slot then return "" end
slot = tonumber(slot)
-- By the end only: clients before 5.x put another text between `repeat` and the time than the scheduler's id.
local slot_text = string.format(":%.0f", slot)
if string.sub(job_id, -#slot_text) ~= slot_text then return "" end

local fields = redis.call("HMGET", scheduler_key, "ic", "every", "limit", "endDate", "offset", "name", "data")
local readable, opts = pcall(cjson.decode, ARGV[6])
if not readable or type(opts) ~= "table" then opts = {} end
if type(opts["repeat"]) ~= "table" then opts["repeat"] = {} end
local iteration = (tonumber(opts["repeat"].count) or tonumber(fields[1]) or 0) + 1
local limit, end_ms = tonumber(fields[3] or ARGV[11]), tonumber(fields[4] or ARGV[12])
if limit and iteration > limit then return "" end
if end_ms and now_ms > end_ms then return "" end

local next_ms
if ARGV[5] ~= "" then
  next_ms = math.max(tonumber(ARGV[5]), now_ms)
else
  local every, offset = tonumber(fields[2] or ARGV[9]), tonumber(fields[5] or ARGV[10]) or 0
  if not every or every <= 0 then return "" end
  next_ms = slot + every
  if next_ms < now_ms then -- missed iterations are skipped, not replayed
    next_ms = math.floor(now_ms / every) * every + offset
    if next_ms <= now_ms then next_ms = next_ms + every end
  end
end

local next_id = string.sub(job_id, 1, -#slot_text - 1) .. string.format(":%.0f", next_ms)
local job_key = base .. next_id
if redis.call("EXISTS", job_key) == 1 then
  redis.call("XADD", events_key, "*", "event", "duplicated", "jobId", next_id)
  return next_id
end
local delay_ms = math.max(0, next_ms - now_ms)
redis.call("INCR", id_key)
redis.call("ZADD", repeat_key, next_ms, scheduler_id)
local has_record = fields[1] or fields[6] or fields[2]
if has_record then redis.call("HINCRBY", scheduler_key, "ic", 1) end -- a client that keeps no record would misread this one
opts["repeat"].count = iteration
opts.jobId, opts.delay, opts.timestamp, opts.repeatJobKey = next_id, delay_ms, now_ms, scheduler_id
-- Clients before 5.20 take an iteration without it for the first of a new schedule.
if ARGV[5] ~= "" or opts.prevMillis then opts.prevMillis = next_ms end
local name, data = fields[6] or ARGV[7], fields[7] or ARGV[8]
local priority = priority_class(opts.priority)
redis.call("HSET", job_key, "name", name, "data", data, "opts", cjson.encode(opts),
  "timestamp", now_ms, "delay", delay_ms, "priority", priority, "rjk", scheduler_id)
redis.call("XADD", events_key, "*", "event", "added", "jobId", next_id, "name", name)
if delay_ms > 0 then
  place_delayed(base, next_id, now_ms + delay_ms)
  wake_when_due(base)
else
  place_ready(base, next_id, priority, opts.lifo == true)
  wake(base)
  redis.call("XADD", events_key, "*", "event", "waiting", "jobId", next_id)
end
return next_id

--[[ advance_scheduler: a worker took a job of a scheduler; store the next one before this one runs.

  Only the job that the scheduler names may advance it, so that retries and duplicates do not do it twice. The client has computed the
  next time from what the scheduler said at the same slot; whoever changed it meanwhile has moved the slot.
  Name and data are the scheduler's; where it has none (older clients write half a record, or none) those of the job that was taken.

  KEYS   1 repeat   2 scheduler   3 id   4 job (that was taken)
  ARGV   1 base   2 clock_offset   3 scheduler_id   4 slot   5 next_ms   6 next_head (of the next id, up to its time)   7 opts_head
         8 names_time ("1" or "")   9 later_ms   10 priority   11 lifo ("1" or "")   12 running (id to remember as running, or "")
  Reply  1 stored, 0 the scheduler is gone or was advanced already, -1 a job of that time is there already
]]
--#include lib/clock
--#include lib/trim
--#include lib/iteration
--#include lib/places

local repeat_key, scheduler_key, id_key, job_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, scheduler_id, next_ms, running = ARGV[1], ARGV[3], tonumber(ARGV[5]), ARGV[12]
local now_ms = server_now(ARGV[2])

local slot = redis.call("ZSCORE", repeat_key, scheduler_id)
if not slot or string.format("%.0f", tonumber(slot)) ~= ARGV[4] then return 0 end
local next_id = ARGV[6] .. ARGV[5]
if redis.call("EXISTS", base .. next_id) == 1 then return -1 end

local fields = redis.call("HMGET", scheduler_key, "ic", "name", "every", "data")
local taken = redis.call("HMGET", job_key, "name", "data", "bp")
require_all_places(base)
redis.call("INCR", id_key)
trim_events(base)
redis.call("ZADD", repeat_key, next_ms, scheduler_id)
if fields[1] or fields[2] or fields[3] then -- a client that keeps no record would misread this one
  if type(redis.pcall("HINCRBY", scheduler_key, "ic", 1)) ~= "number" then redis.call("HSET", scheduler_key, "ic", 1) end
  if running ~= "" then redis.call("HSET", scheduler_key, "bprun", running) end
end
place_iteration(base, {
  id = next_id, scheduler_id = scheduler_id, slot = next_ms, opts_head = ARGV[7], names_time = ARGV[8] == "1",
  later_ms = tonumber(ARGV[9]), name = fields[2] or taken[1] or "", data = fields[4] or taken[2] or "{}",
  priority = priority_class(ARGV[10]), at_front = ARGV[11] == "1", is_ours = taken[3],
}, now_ms)
return 1

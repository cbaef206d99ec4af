--[[ pause_scheduler: keep a scheduler, without a job to come.

  Whoever serves the queue then finds nothing to run and nothing to advance, of whichever client. While its job runs and has not
  advanced it yet, the scheduler is moved by one millisecond: it names another job now, and that one advances nothing.
  What the next job is made of is kept in the record.

  KEYS   1 repeat   2 scheduler
  ARGV   1 base   2 clock_offset   3 scheduler_id
  Reply  1 paused, 2 it was paused already, 0 no such scheduler, -1 it has no record (made by a client before 5.20)
]]
--#include lib/clock
--#include lib/trim
--#include lib/iteration_id
--#include lib/pending_iteration

local repeat_key, scheduler_key = KEYS[1], KEYS[2]
local base, scheduler_id = ARGV[1], ARGV[3]
local now_ms = server_now(ARGV[2])

local slot = redis.call("ZSCORE", repeat_key, scheduler_id)
if not slot then return 0 end
slot = tonumber(slot)
local record = redis.call("HMGET", scheduler_key, "ic", "bppaused")
if not record[1] then return -1 end
if record[2] then return 2 end
local job_id = iteration_id(scheduler_id, slot)
local fields = redis.call("HMGET", base .. job_id, "opts", "finishedOn")
local place = pending_place(base, job_id)
redis.call("HSET", scheduler_key, "bppaused", string.format("%.0f", now_ms))
if place then
  trim_events(base)
  take_pending(base, job_id, place)
  redis.call("HSET", scheduler_key, "bpopts", fields[1] or "{}", "bpstep", 0)
  redis.pcall("XADD", base .. "events", "*", "event", "removed", "jobId", job_id, "prev", string.sub(place, #base + 1))
elseif fields[1] and not fields[2] then -- taken, and not advanced yet
  redis.call("ZADD", repeat_key, slot - 1, scheduler_id)
  redis.call("HSET", scheduler_key, "bpopts", fields[1], "bpstep", 1)
end -- else it has ended: there is nothing to resume with
return 1

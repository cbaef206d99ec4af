--[[ resume_scheduler: let a paused scheduler go on, at a time that the client has computed.

  KEYS   1 repeat   2 scheduler   3 id
  ARGV   1 base   2 clock_offset   3 scheduler_id   4 slot (that the time was computed from)   5 next_ms ("" = it has ended)
         6 opts_head   7 names_time ("1" or "")   8 later_ms   9 priority   10 lifo ("1" or "")   11 step (to add to the count)
  Reply  1 goes on, 2 it was not paused, 0 no such scheduler, or it was changed meanwhile, -1 a job of that time is there already
]]
--#include lib/clock
--#include lib/trim
--#include lib/iteration_id
--#include lib/iteration
--#include lib/places

local repeat_key, scheduler_key, id_key = KEYS[1], KEYS[2], KEYS[3]
local base, scheduler_id, next_ms = ARGV[1], ARGV[3], tonumber(ARGV[5])
local now_ms = server_now(ARGV[2])

local slot = redis.call("ZSCORE", repeat_key, scheduler_id)
if not slot then return 0 end
local record = redis.call("HMGET", scheduler_key, "bppaused", "name", "data", "bp")
if not record[1] then return 2 end
if string.format("%.0f", tonumber(slot)) ~= ARGV[4] then return 0 end
if next_ms then
  local job_id = iteration_id(scheduler_id, next_ms)
  if redis.call("EXISTS", base .. job_id) == 1 then return -1 end
  require_all_places(base)
  redis.call("INCR", id_key)
  trim_events(base)
  redis.call("ZADD", repeat_key, next_ms, scheduler_id)
  if type(redis.pcall("HINCRBY", scheduler_key, "ic", ARGV[11])) ~= "number" then redis.call("HSET", scheduler_key, "ic", 1) end
  place_iteration(base, {
    id = job_id, scheduler_id = scheduler_id, slot = next_ms, opts_head = ARGV[6], names_time = ARGV[7] == "1",
    later_ms = tonumber(ARGV[8]), name = record[2] or "", data = record[3] or "{}",
    priority = priority_class(ARGV[9]), at_front = ARGV[10] == "1", is_ours = record[4],
  }, now_ms)
end
redis.call("HDEL", scheduler_key, "bppaused", "bpopts", "bpstep")
return 1

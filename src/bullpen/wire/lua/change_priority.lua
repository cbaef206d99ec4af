--[[ change_priority: give a job another priority, and another place when it waits already.

  In a class of priority `lifo` means its front; without a priority, the front of the whole line. Unlike other clients this one
  tells idle workers, because what was moved may be what they wait for. There is no event: the job stays where it was, waiting.

  KEYS   1 job   2 wait   3 paused   4 prioritized
  ARGV   1 base   2 job_id   3 priority   4 lifo ("1" or "")
  Reply  0 done, -1 no such job
]]
--#include lib/wake
--#include lib/places
--#include lib/ready
--#include lib/leave_line
--#include lib/state
--#include lib/record

local job_key, wait_key, paused_key, prioritized_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, job_id, priority, lifo = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == "1"

local before = redis.call("HMGET", job_key, "name", "priority")
if not before[1] or is_record(base, job_id) then return -1 end
require_places(base)
redis.call("HSET", job_key, "priority", priority)
redis.call("HDEL", job_key, "bporphan") -- whoever looks for orphans must see that it moved
local state = state_of(base, job_id) -- first, so that a long line is not searched for a job that runs or has finished
local waits = state == "waiting" or not state
if (state == "prioritized" and redis.call("ZREM", prioritized_key, job_id) == 1)
  or (waits and (leave_line(base, paused_key, job_id) or leave_line(base, wait_key, job_id))) then
  place_ready(base, job_id, priority, lifo, lifo)
  wake(base)
end
return 0

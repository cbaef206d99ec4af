--[[ change_delay: let a delayed job become due at another time, counted from now.

  Why a script: a job that becomes due between reading and writing would be delayed and ready at once.

  KEYS   1 job   2 delayed
  ARGV   1 base   2 clock_offset   3 job_id   4 delay_ms
  Reply  0 done, -1 no such job, -3 it is not delayed
]]
--#include lib/clock
--#include lib/trim
--#include lib/delayed
--#include lib/due_marker

local job_key, delayed_key = KEYS[1], KEYS[2]
local base, job_id, delay_ms = ARGV[1], ARGV[3], tonumber(ARGV[4])

if redis.call("EXISTS", job_key) == 0 then return -1 end
if redis.call("ZREM", delayed_key, job_id) == 0 then return -3 end
trim_events(base)
redis.call("HSET", job_key, "delay", delay_ms)
place_delayed(base, job_id, server_now(ARGV[2]) + delay_ms)
wake_when_due(base)
return 0

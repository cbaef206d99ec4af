--[[ retry: put a finished job back in line; a parent waits for the children that it needs. The job's dead letter, if it has one, goes:
  what it asked for is done.

  KEYS   1 job   2 finished (the set named by state)
  ARGV   1 base   2 job_id   3 state   4 resets_attempts ("1" or "")   5 dead_letter_base
  Reply  0 done, -1 no such job, -3 it is not in that state
]]
--#include lib/trim
--#include lib/wake
--#include lib/places
--#include lib/reprocess

local job_key, finished_key = KEYS[1], KEYS[2]
local base, job_id, state, resets_attempts, dead_letter_base = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == "1", ARGV[5]

require_places(base)
local was_there = redis.call("ZREM", finished_key, job_id) == 1
if redis.call("EXISTS", job_key) == 0 then return -1 end
if not was_there then return -3 end
trim_events(base)
if not reprocess(base, job_id, state, resets_attempts, dead_letter_base) then return -1 end
wake(base)
return 0

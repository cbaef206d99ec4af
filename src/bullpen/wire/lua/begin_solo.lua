--[[ begin_solo: a job that stalled repeatedly is about to run with nothing else in its process.

  Leaves the take and the counts of this moment, by which the next take sees how the run ended (`judge_suspect`).

  KEYS   1 job   2 lock
  ARGV   1 token   2 attempts_started   3 stalled_count   4 attempts_made
  Reply  1 (run it) or 0 (the lock is no longer ours)
]]
local job_key, lock_key = KEYS[1], KEYS[2]
local token, attempts_started, stalled_count, attempts_made = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if redis.call("GET", lock_key) ~= token then return 0 end
redis.call("HSET", job_key, "bpsolo", attempts_started, "bpstc", stalled_count, "bpatm", attempts_made)
return 1

--[[ redrive_failed: send a job of the failed set back, identity kept, attempts reset, and note who did it and when.

  For queues whose failed set is their store of dead letters. The number of the take tells one failure from the next: whoever looked at
  an earlier one moves nothing.

  KEYS   1 job   2 failed
  ARGV   1 base   2 clock_offset   3 dead_letter_base   4 job_id   5 attempts_started   6 note (JSON members, less the instant)
         7 data (new; "": as it is)   8 data_digest (SHA-1 of the data that was edited, or "")
  Reply  1 redriven, 0 the job is no longer failed, or failed again, -1 its data is not what was edited
]]
--#include lib/clock
--#include lib/trim
--#include lib/wake
--#include lib/places
--#include lib/reprocess
--#include lib/notes

local job_key, failed_key = KEYS[1], KEYS[2]
local base, dead_letter_base, job_id, attempts_started, note = ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local data, data_digest = ARGV[7], ARGV[8]
local now_ms = server_now(ARGV[2])

if (redis.call("HGET", job_key, "ats") or "0") ~= attempts_started then return 0 end
if not redis.call("ZSCORE", failed_key, job_id) then return 0 end
if data ~= "" and redis.sha1hex(redis.call("HGET", job_key, "data") or "") ~= data_digest then return -1 end
require_places(base)
redis.call("ZREM", failed_key, job_id)
trim_events(base)
redis.call("HSET", job_key, "bpredriven", with_note(redis.call("HGET", job_key, "bpredriven"), note, now_ms))
if data ~= "" then redis.call("HSET", job_key, "data", data) end
reprocess(base, job_id, "failed", true, dead_letter_base)
wake(base)
return 1

--[[ offer_dead_letter: write the dead letter of a job that failed without one.

  Why a script: meanwhile the job may have been retried, and a letter for a job that runs would be redriven in vain.
  A letter of an earlier failure goes: whoever retried the job since knew nothing of it.

  KEYS   1 job   2 failed
  ARGV   1 base   2 clock_offset   3 job_id   4 attempts_started   5 dead_letter_base   6 entry_id   7 entry_name   8 entry_head
         9 entry_tail   10 entry_opts   11 data_form   12 entry_facts (see lib/letter_index)
  Reply  1 written, 0 the job is no longer failed, or failed again, -1 it cannot be written
]]
--#include lib/clock
--#include lib/failure
--#include lib/take_letter

local job_key, failed_key = KEYS[1], KEYS[2]
local job_id, attempts_started, dead_letter_base = ARGV[3], ARGV[4], ARGV[5]
local FIRST_OF_ENTRY = 1 -- write_dead_letter counts the arguments of an entry as the exchange does, from the rule on

if not redis.call("ZSCORE", failed_key, job_id) then return 0 end
if (redis.call("HGET", job_key, "ats") or "0") ~= attempts_started then return 0 end
local earlier = redis.call("HGET", job_key, "bpdl")
if earlier and earlier ~= ARGV[6] then take_letter_away(ARGV[1], dead_letter_base, earlier) end
return write_dead_letter(dead_letter_base, FIRST_OF_ENTRY, job_key, server_now(ARGV[2])) and 1 or -1

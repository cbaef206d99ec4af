--[[ exchange: settle the jobs that a worker finished and take the next ones, in one step.

  Why one script: each job leaves `active` for exactly one next state, with lock, events and side effects; and what a
  finished job frees (a slot, a parent, a deduplication id) must be visible to the take that follows.
  Redis does not roll back what a script did before it raised. So all hashes are read first; auxiliary structures (events,
  marker, stalled, limiter) are written with pcall, because a foreign key of the wrong type there must not tear a settle in
  half; and each job is settled inside a pcall of its own, so that one bad job harms only itself. What was popped to be taken goes
  back when a later command is refused.
  The first write is LREM or RPOP, which Redis allows when memory is full; the rest of the script is then allowed too. (Or LMOVE,
  with RPOP in its place when it is refused.)
  A caller that lost the reply repeats its number: it gets the same codes and the same jobs, and nothing is written.

  A key or an argument costs the server as much as a hundred lines of Lua, so only the key that routes the call is sent, and what
  few workers use is one text.

  KEYS   1 call
  ARGV   1 base   2 call_number   3 call_ttl_ms   4 token   5 lock_ms   6 take   7 worker_name   8 extras
         extras: "" = none of these; else five lines, each may be empty: clock_offset   limiter_max   limiter_duration_ms
         metrics_minutes   dead_letter_base
         then per settled job: job_id   token   kind   and, by kind:
           completed         rule   value
           failed            rule   reason   stack   stack_limit   attempts   entry_id ("" = no dead letter)
                             entry_name   entry_head   entry_tail   entry_opts   data_form ("" = JSON, "text", "sent" = in the head)
                             entry_facts (see lib/letter_index)
           retry             delay_ms   reason   stack   stack_limit   lifo ("1" or "")
           delayed           delay_ms
           waiting           pause_ms (> 0: also limit the queue that long)
           waiting-children
         rule is "all", "none" or "<count>:<age ms>:<limit>"
  Reply  { lines, { taken: values of the fields that read_taken reads, of a job that was tried before also its last error and
         its stacks, id }, and only where ids without a job were dropped: { id, why ("gone", "name", "type"), ... } }
         lines: call_number   now   code per settled job, with commas   limited_ms   next_due_ms   more ("1" or "0")   and what is
         for the next call. In one text: a number in a reply costs the server more than all of them written.
         codes: 0 done, 2 done, but the dead letter could not be written, -1 no job, -2 no lock, -3 not active,
         -4 pending children, -6 foreign lock, -9 failed children, -20 something raised, the job is still active
]]
-- luacheck: ignore 431
-- (What is included further down has arguments named as locals of this file.)
--#include lib/clock
--#include lib/bound

local call_key, base, call_number, call_ttl_ms, token = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lock_ms, take, worker_name, extras = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8]
--#include exchange/read
--#include exchange/settle
--#include exchange/take
--#include exchange/answer

--[[ cancel: end a job that has not begun, or ask the worker that runs it to end it.

  Why a script: between looking where the job is and ending it a worker may take it.
  One that waits, in whatever way, fails here and now, with all that a failure does to its parent, its deduplication id and older
  failed jobs; it made no attempt. One that is active gets a deferred failure: whoever takes it next, a worker of another client too,
  fails it without running it, so the wish outlives its worker. That worker reads the stream of wishes, and finds the field
  `bpcancel` when it renews the lock should the stream be lost. Asking again changes nothing.
  The event `cancelled` stands before `failed`: whoever waits for the result of a job that was just added reads from the second event
  behind the add on.

  KEYS   1 job   2 cancels
  ARGV   1 base   2 clock_offset   3 job_id   4 text (of the failure)   5 reason (of the caller, may be empty)   6 rule (as of the exchange)
  Reply  1 it is cancelled, 2 it runs and its worker is asked, -1 no such job, -3 it has finished, -8 a scheduler's current iteration
]]
--#include lib/clock
--#include lib/trim
--#include lib/sets
--#include lib/removal
--#include lib/leave_line
--#include lib/deduplication
--#include lib/retention

local job_key, cancels_key = KEYS[1], KEYS[2]
local base, job_id, text, reason, rule = ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local now_ms, now_text = server_now(ARGV[2])
local ASKED_MS = 60000 -- far longer than any worker takes to read it; one that could not finds it when it renews the lock
local failed_key, events_key = base .. "failed", base .. "events"

local fields = redis.pcall("HMGET", job_key, "name", "parentKey", "parent", "deid", "rjk", "bpcancel")
if fields.err or not fields[1] then return -1 end
local state = set_of(base, job_id)
if state == "completed" then return -3 end
if state == "failed" then return fields[6] and 1 or -3 end

local token = redis.call("GET", job_key .. ":lock")
if not state and (token or find_in_line(base, base .. "active", job_id)) then
  redis.call("HSETNX", job_key, "bpcancel", reason)
  redis.call("HSET", job_key, "defa", text)
  trim_events(base)
  redis.pcall("XADD", events_key, "*", "event", "cancelled", "jobId", job_id, "reason", reason, "prev", "active")
  redis.pcall("XADD", cancels_key, "MAXLEN", "~", 10000, "*", "job", job_id, "token", token or "", "reason", reason)
  redis.pcall("PEXPIRE", cancels_key, ASKED_MS)
  return 2
end
if is_current_iteration(base, job_id, fields[5]) then return -8 end

redis.call("ZCARD", failed_key) -- raises, if it can go nowhere, before the job has left its state
if fields[4] then require_all_places(base) end -- neither could what follows it
if state then
  redis.call("ZREM", base .. state, job_id)
elseif leave_line(base, base .. "wait", job_id) or leave_line(base, base .. "paused", job_id) then
  state = "waiting"
else
  return -3 -- nothing lists it: it is on its way out
end
trim_events(base)
redis.pcall("XADD", events_key, "*", "event", "cancelled", "jobId", job_id, "reason", reason, "prev", state)
if fields[4] then finish_deduplication(base, fields[4], job_id, now_ms) end
if fields[2] then on_child_failed(fields[2], fields[3], job_key, text, now_ms) end
if rule == "none" then
  remove_job_keys(job_key)
  if fields[2] then on_child_removed(fields[2], job_key, now_ms) end
else
  redis.call("HSET", job_key, "failedReason", text, "finishedOn", now_text, "bpcancel", reason)
  redis.call("HDEL", job_key, "defa")
  redis.call("ZADD", failed_key, now_text, job_id)
  if rule ~= "all" then apply_retention(base, failed_key, rule, now_ms) end
end
redis.pcall("XADD", events_key, "*", "event", "failed", "jobId", job_id, "failedReason", text, "prev", state, "cancelled", "1")
redis.pcall("HINCRBY", base .. "meta", "bpcancelled", 1) -- no worker hears of it
return 1

--[[ redrive: send a dead letter back to its queue, identity kept, attempts reset, and note who did it and when.

  Why one script over both queues: dying between "job is back" and "entry is gone" would offer the same work twice.
  Repeat-safe: once the entry is gone the answer is "gone" and nothing is written.
  The failed job itself goes back when it still exists; if retention took it, it is rebuilt from the entry. Its starts are counted on
  in both cases, because their number fences the writes of earlier runs.

  KEYS   1 entry   2 job   3 failed
  ARGV   1 base   2 clock_offset   3 dead_letter_base   4 entry_id   5 job_id   6 name   7 data   8 opts   9 timestamp   10 priority
         11 lifo ("1" or "")   12 attempts_started   13 history (JSON list of earlier redrives, of the entry)
         14 note (JSON members of this redrive, less the instant)   15 edited ("1": data is new and replaces the job's; or "")
  Reply  "redriven", "rebuilt", "gone" (no such entry), or "busy:<state>" when the id is in use by a job that has not failed
]]
--#include lib/clock
--#include lib/trim
--#include lib/wake
--#include lib/places
--#include lib/leave_state
--#include lib/reprocess
--#include lib/state
--#include lib/notes
--#include lib/letter_index
--#include lib/adopt

local entry_key, job_key, failed_key = KEYS[1], KEYS[2], KEYS[3]
local base, dead_letter_base, entry_id, job_id = ARGV[1], ARGV[3], ARGV[4], ARGV[5]
local history, note, is_edited = ARGV[13], ARGV[14], ARGV[15] == "1"
local now_ms = server_now(ARGV[2])

-- rejoin_rebuilt: the hash of a job that is gone named its parent; so do its options. A parent that did not count it is not its own.
local function rejoin_rebuilt(rebuilt_key, opts_text)
  local readable, opts = pcall(cjson.decode, opts_text)
  local parent = readable and type(opts) == "table" and opts.parent
  if type(parent) ~= "table" or type(parent.queue) ~= "string" or type(parent.id) ~= "string" then return end
  local parent_key, link = parent_link(opts)
  if lives(parent_key) and rejoin_parent(parent_key, rebuilt_key) then
    redis.call("HSET", rebuilt_key, "parentKey", parent_key, "parent", link)
  end
end

if redis.call("EXISTS", entry_key) == 0 then return "gone" end
require_places(base)
local answer = "redriven"
redis.call("HSETNX", base .. "meta", "opts.maxLenEvents", 10000)
trim_events(base)
if redis.call("EXISTS", job_key) == 1 then
  if redis.call("ZREM", failed_key, job_id) == 0 then return "busy:" .. (state_of(base, job_id) or "waiting") end
  redis.call("HSET", job_key, "bpredriven", with_note(redis.call("HGET", job_key, "bpredriven"), note, now_ms))
  if is_edited then redis.call("HSET", job_key, "data", ARGV[7]) end
  reprocess(base, job_id, "failed", true, dead_letter_base)
else
  answer = "rebuilt"
  redis.call("HSET", job_key, "name", ARGV[6], "data", ARGV[7], "opts", ARGV[8], "timestamp", ARGV[9], "delay", 0,
    "priority", priority_class(ARGV[10]), "ats", ARGV[12], "bpredriven", with_note(history, note, now_ms))
  name_lane(base, job_id, ARGV[8])
  redis.pcall("XADD", base .. "events", "*", "event", "added", "jobId", job_id, "name", ARGV[6])
  rejoin_rebuilt(job_key, ARGV[8])
  place_again(base, job_id, priority_class(ARGV[10]), ARGV[11] == "1", "failed")
end
wake(base)
if redis.call("EXISTS", entry_key) == 1 then -- else it was the job's latest, and went with it
  local state = leave_state(dead_letter_base, entry_id)
  remove_job_keys(entry_key)
  unindex_letter(dead_letter_base, entry_id)
  redis.pcall("XADD", dead_letter_base .. "events", "*", "event", "removed", "jobId", entry_id, "prev", state or "unknown")
end
return answer

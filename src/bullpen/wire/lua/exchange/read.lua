-- Read what decides: arguments, the record of the last call, locks, the state of the queue.

local clock_offset, limiter_max, limiter_duration_ms, metrics_minutes, dead_letter_base = "0", "", "", "", ""
if extras ~= "" then
  clock_offset, limiter_max, limiter_duration_ms, metrics_minutes, dead_letter_base
    = string.match(extras, "^(.-)\n(.-)\n(.-)\n(.-)\n(.*)$")
end
local wait_key, active_key, prioritized_key, delayed_key = base .. "wait", base .. "active", base .. "prioritized", base .. "delayed"
local limiter_key, pc_key, events_key = base .. "limiter", base .. "pc", base .. "events"
local MANUAL_LIMIT, SHORT, LOOK_AT_FULL_MS = 9007199254740991, 500, 200
local MOST_TOLD = 20 -- ids that were dropped, each with its reason
local MOST_BYTES = 8388608 -- of data per call; what does not fit is put back

-- A call about one job costs the server more for Lua and for each way into a command than for the commands themselves. So what can be
-- asked together is, and what is seldom needed is made, and included, where it is needed: the line that makes a function or a table
-- costs each time it is run, a function the more the more names from outside it uses.
local function read_taken(job_key)
  local fields = redis.pcall("HMGET", job_key, "name", "data", "opts", "timestamp", "priority", "atm", "ats", "stc",
    "defa", "parentKey", "rjk", "attemptsMade", "progress")
  if fields[6] then -- tried before: then there is an error to be seen
    local past = redis.call("HMGET", job_key, "failedReason", "stacktrace", "bpdl")
    fields[14], fields[15] = past[1], past[2]
    if past[3] and dead_letter_base ~= "" then
      -- Another client put it back in line: the letter of the failure would ask for a job that runs already.
--#scope
--#include lib/take_letter
      pcall(take_letter_away, base, dead_letter_base, past[3])
      redis.call("HDEL", job_key, "bpdl")
--#end
    end
  end
  return fields
end

-- One read for the record of the last call, the limiter, the counter of priorities and all locks: each command costs more than
-- a key. The last of the four never exists: a cluster whose slot is on its way refuses a command about keys of which one is not
-- there, so the whole call is refused here, before it has written anything.
local string_keys = { call_key, limiter_key, pc_key, base .. "bp:none" }
local places = {} -- where the arguments of each settled job begin
local is_plain = true -- no job but the settled ones is touched, and those complete
local arg, last_arg, settle_count, lengths = 9, #ARGV, 0, nil
while arg <= last_arg do
  settle_count = settle_count + 1
  places[settle_count] = arg
  string_keys[settle_count + 4] = base .. ARGV[arg] .. ":lock"
  if ARGV[arg + 2] == "completed" then
    arg = arg + 5
  else
    is_plain = false
    lengths = lengths or { failed = 12, retry = 5, delayed = 1, waiting = 1, ["waiting-children"] = 0 }
    arg = arg + 3 + lengths[ARGV[arg + 2]]
  end
end
local strings = redis.call("MGET", unpack(string_keys))
local record, limiter, priority_counter = strings[1], strings[2], strings[3]

-- A repeated call: answer from the record. Jobs whose lock is no longer this call's token were lost meanwhile.
local was_short -- "s": `active` was no long list when the last call of this caller ended
if record then
  local number
  number, was_short = string.match(record, "^(%d+)(s?)")
  if number == call_number then
    local taken, line = {}, 0
    for job_id in string.gmatch(record, "([^\n]*)\n") do
      line = line + 1
      if line > 6 then
        local job_key = base .. job_id
        local fields = redis.call("GET", job_key .. ":lock") == token and read_taken(job_key)
        if fields and not fields.err and fields[1] then
          fields[#fields + 1] = job_id
          taken[#taken + 1] = fields
        end
      end
    end
    return { record, taken }
  elseif #number > #call_number or (#number == #call_number and number > call_number) then -- as numbers, without reading them
    return redis.error_reply("BPSTALE a later call of this caller was answered already")
  end
end

local now_ms, now_text = server_now(clock_offset)
local meta = redis.call("HMGET", base .. "meta", "paused", "concurrency", "max", "duration", "opts.maxLenEvents", "bplanes")
local concurrency = meta[2] and tonumber(meta[2])
local codes = {}
local completed, failed = 0, 0 -- how many finish in this call
local active_length -- of `active` at this moment, once it is known
local is_idle = false -- known: neither `delayed` nor `prioritized` exists
local ready, has_delayed -- ready: > 0 when ready jobs are left, 0 when none are; nil: not known

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
--#include lib/line
--#include lib/leave_line
--#include lib/remove
--#include lib/take_letter
      pcall(take_letter_away, base, dead_letter_base, past[3])
      redis.call("HDEL", job_key, "bpdl")
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
    lengths = lengths or { failed = 11, retry = 5, delayed = 1, waiting = 1, ["waiting-children"] = 0 }
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
local meta = redis.call("HMGET", base .. "meta", "paused", "concurrency", "max", "duration", "opts.maxLenEvents")
local concurrency = meta[2] and tonumber(meta[2])
local codes = {}
local completed, failed = 0, 0 -- how many finish in this call
local active_length -- of `active` at this moment, once it is known
local is_idle = false -- known: neither `delayed` nor `prioritized` exists
local ready, has_delayed -- ready: > 0 when ready jobs are left, 0 when none are; nil: not known

if settle_count > 0 then
--#include lib/remove
  -- Read everything that decides before the first write. Keys that are seldom there are asked for in one command.
  local seldom_keys, hashes = { base .. "stalled", delayed_key, prioritized_key }, {}
  -- Who settles one job and wants no other knows of none: `wait` is empty as a rule.
  local asks_for_wait = take == 0 and settle_count == 1
  if asks_for_wait then seldom_keys[4] = wait_key end
  local places_asked = #seldom_keys
  for index = 1, settle_count do
    local at = places[index]
    local job_key = base .. ARGV[at]
    if ARGV[at + 2] == "completed" then
      seldom_keys[#seldom_keys + 1] = job_key .. ":dependencies"
      seldom_keys[#seldom_keys + 1] = job_key .. ":unsuccessful"
      local hash = redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "failedReason")
      if hash[3] or hash[4] then is_plain = false end
      hashes[index] = hash
    else
      hashes[index] = redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "parent", "priority", "stacktrace", "defa")
    end
  end
  local found = redis.call("EXISTS", unpack(seldom_keys))
  local has_children = found > 0 and found > redis.call("EXISTS", unpack(seldom_keys, 1, places_asked))

  local most_events = stream_bound(meta[5])
  local completed_members, failed_members, rules = {}, nil, nil
  local settled, trimmed = 0, false

  -- One function per outcome: (job_id, job_key, where its arguments are, its hash, attempts made with this one). `links` is what the
  -- completion of one job does to others; the rest of it stands below.
  local settle
  if not is_plain then
--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/layout
    if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/ready
--#include lib/parents
--#include lib/deduplication
--#include lib/failure
    local function trim_once()
      if not trimmed then redis.pcall("XTRIM", events_key, "MAXLEN", "~", most_events) end
      trimmed = true
    end

    settle, failed_members = {}, {}

    function settle.links(job_id, job_key, at, hash)
      if hash[4] then finish_deduplication(base, hash[4], job_id, now_ms) end
      if hash[3] then on_child_completed(hash[3], job_key, ARGV[at + 1], now_ms) end
    end

    function settle.failed(job_id, job_key, at, hash, made)
      local rule, reason, entry_id = ARGV[at], ARGV[at + 1], ARGV[at + 5]
      local code = 0
      trim_once()
      if hash[4] then finish_deduplication(base, hash[4], job_id, now_ms) end
      if hash[3] then on_child_failed(hash[3], hash[5], job_key, reason, now_ms) end
      if entry_id ~= "" and not write_dead_letter(dead_letter_base, at, job_key, now_ms) then
        code = 2
        rule = "all" -- it must not vanish without a trace
      end
      if rule == "none" then
        remove_job_keys(job_key)
        if hash[3] then on_child_removed(hash[3], job_key, now_ms) end
      else
        redis.call("HSET", job_key, "failedReason", reason, "finishedOn", now_text, "atm", made,
          "stacktrace", append_stack(hash[7], ARGV[at + 2], ARGV[at + 3]))
        if hash[8] then redis.call("HDEL", job_key, "defa") end
        if rule ~= "all" then
          rules = rules or {}
          rules[rule .. "f"] = "failed"
        end
        failed_members[#failed_members + 1] = now_text
        failed_members[#failed_members + 1] = job_id
      end
      failed = failed + 1
      local is_text, stack = pcall(cjson.decode, ARGV[at + 2])
      redis.pcall("XADD", events_key, "*", "event", "failed", "jobId", job_id, "failedReason", reason, "prev", "active",
        "attemptsMade", made, "stacktrace", is_text and type(stack) == "string" and stack or "")
      if tonumber(made) >= tonumber(ARGV[at + 4]) then
        redis.pcall("XADD", events_key, "*", "event", "retries-exhausted", "jobId", job_id, "attemptsMade", made)
      end
      return code
    end

    function settle.retry(job_id, job_key, at, hash, made)
      local delay_ms = tonumber(ARGV[at])
      trim_once()
      redis.call("HSET", job_key, "failedReason", ARGV[at + 1], "atm", made, "delay", delay_ms,
        "stacktrace", append_stack(hash[7], ARGV[at + 2], ARGV[at + 3]))
      if delay_ms > 0 then
        place_delayed(base, job_id, now_ms + delay_ms)
        wake_when_due(base)
      else
        place_ready(base, job_id, priority_class(hash[6]), ARGV[at + 4] == "1") -- the marker is set at the end, once
        redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "active")
      end
      redis.pcall("XADD", events_key, "*", "event", "retry", "jobId", job_id, "delay", delay_ms, "attemptsMade", made)
      return 0
    end

    function settle.delayed(job_id, job_key, at)
      trim_once()
      redis.call("HSET", job_key, "delay", ARGV[at])
      place_delayed(base, job_id, now_ms + tonumber(ARGV[at]))
      wake_when_due(base)
      return 0
    end

    -- The job keeps its turn, no attempt is counted.
    local function give_back(job_id, hash)
      trim_once()
      place_ready(base, job_id, priority_class(hash[6]), true, true)
      redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "active")
      return 0
    end

    function settle.waiting(job_id, _, at, hash)
      if tonumber(ARGV[at]) > 0 then
        redis.pcall("SET", limiter_key, MANUAL_LIMIT, "PX", ARGV[at])
        limiter = MANUAL_LIMIT
      end
      return give_back(job_id, hash)
    end

    settle["waiting-children"] = function(job_id, job_key, _, hash)
      if redis.call("SCARD", job_key .. ":dependencies") == 0 then return give_back(job_id, hash) end
      trim_once()
      redis.call("ZADD", base .. "waiting-children", now_ms, job_id)
      redis.pcall("XADD", events_key, "*", "event", "waiting-children", "jobId", job_id, "prev", "active")
      return 0
    end
  end

  -- LREM walks `active` from one end; the latest taken stand first. Among equals the oldest finish first, near the end. Beside
  -- thousands that run for minutes the short ones finish near the front, and from the end each would pass all the others: 10 000
  -- of those made a drain ten times slower. In a long list one job of the batch is sought to choose the end for all. The list is
  -- not long for us if it was not when the caller's last call ended: those who came later stand before our jobs.
  local lrem_count = "-1"
  if was_short ~= "s" then
    active_length = redis.call("LLEN", active_key)
    if active_length > SHORT
      and not redis.call("LPOS", active_key, ARGV[places[math.ceil(settle_count / 2)]], "RANK", -1, "MAXLEN", 250) then
      lrem_count = "1"
    end
  end

  for index = 1, settle_count do
    local at, hash, lock = places[index], hashes[index], strings[index + 4]
    local job_id, kind = ARGV[at], ARGV[at + 2]
    local job_key = base .. job_id
    local code = 0
    if hash.err or not hash[1] then
      code = -1
    elseif not lock then
      code = -2
    elseif lock ~= ARGV[at + 1] then
      code = -6
    elseif has_children and kind == "completed" and redis.call("EXISTS", job_key .. ":dependencies") == 1 then
      code = -4
    elseif kind == "waiting-children" or (has_children and kind == "completed") then
      if redis.call("EXISTS", job_key .. ":unsuccessful") == 1 then code = -9 end
    end
    if code == 0 and redis.call("LREM", active_key, lrem_count, job_id) == 0 then code = -3 end
    if code == 0 then
      -- One bad job harms only itself: what raises here (a key of the wrong type, say) leaves the others alone, and the job
      -- active under its lock, from where the stalled check fetches it.
      local is_settled, answer = true, 0
      local made = "1" -- text, since handing a number to a command formats it each time
      if hash[2] and hash[2] ~= "0" then
        -- What is no finite number counts as used up; nan would stay nan, and the job would be tried for ever.
        local before = tonumber(hash[2])
        if not before or before ~= before or before >= 9007199254740990 then before = 9007199254740990 end
        made = string.format("%.0f", math.max(0, math.floor(before)) + 1)
      end
      if kind ~= "completed" then
        is_settled, answer = pcall(settle[kind], job_id, job_key, at + 3, hash, made)
      else
        local rule, value = ARGV[at + 3], ARGV[at + 4]
        if hash[3] or hash[4] then is_settled = pcall(settle.links, job_id, job_key, at + 3, hash) end
        if is_settled and rule == "none" then
          is_settled = pcall(remove_job_keys, job_key)
        elseif is_settled then
          is_settled = type(redis.pcall("HSET", job_key, "returnvalue", value, "finishedOn", now_text, "atm", made)) == "number"
        end
        if is_settled then
          completed = completed + 1
          if rule ~= "none" then
            if hash[5] then redis.pcall("HDEL", job_key, "failedReason") end
            if rule ~= "all" then
              rules = rules or {}
              rules[rule .. "c"] = "completed"
            end
            completed_members[#completed_members + 1] = now_text
            completed_members[#completed_members + 1] = job_id
          end
          if trimmed then
            redis.pcall("XADD", events_key, "*", "event", "completed", "jobId", job_id, "returnvalue", value,
              "prev", "active", "attemptsMade", made)
          else
            redis.pcall("XADD", events_key, "MAXLEN", "~", most_events, "*", "event", "completed", "jobId", job_id,
              "returnvalue", value, "prev", "active", "attemptsMade", made)
            trimmed = true
          end
        end
      end
      if is_settled then
        code = answer
        settled = settled + 1
      else
        code = -20
        redis.pcall("LPUSH", active_key, job_id)
      end
    end
    codes[index] = code
  end

  -- Put the jobs of each outcome into their set; where that is impossible they stay active, as above.
  local lost_completed = #completed_members > 0 and type(redis.pcall("ZADD", base .. "completed", unpack(completed_members))) ~= "number"
  local lost_failed = failed_members and #failed_members > 0
    and type(redis.pcall("ZADD", base .. "failed", unpack(failed_members))) ~= "number"
  if lost_completed or lost_failed then
    for index = 1, settle_count do
      local job_id, kind = ARGV[places[index]], ARGV[places[index] + 2]
      if (kind == "completed" and lost_completed or kind == "failed" and lost_failed) and codes[index] >= 0
        and redis.pcall("EXISTS", base .. job_id) == 1 then
        redis.pcall("LPUSH", active_key, job_id)
        codes[index] = -20
        settled = settled - 1
      end
    end
  end
  if active_length then active_length = active_length - settled end

  if settled > 0 then
    if settled == settle_count then
      redis.call("DEL", unpack(string_keys, 5))
    else
      local locks = {}
      for index = 1, settle_count do
        if codes[index] >= 0 then locks[#locks + 1] = string_keys[index + 4] end
      end
      redis.call("DEL", unpack(locks))
    end
    if found > 0 then -- else `stalled` does not exist
      local settled_ids = {}
      for index = 1, settle_count do
        if codes[index] >= 0 then settled_ids[#settled_ids + 1] = ARGV[places[index]] end
      end
      redis.pcall("SREM", base .. "stalled", unpack(settled_ids))
    end
    if rules then
--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/layout
    if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/ready
--#include lib/parents
--#include lib/letter
--#include lib/retention
      is_plain = false -- what goes may be a child, and its parent free to run
      for rule, set_name in pairs(rules) do
        local needs_letters = dead_letter_base ~= "" and set_name == "failed"
        pcall(apply_retention, base, base .. set_name, string.sub(rule, 1, -2), now_ms, needs_letters)
      end
    end
    if metrics_minutes ~= "" then
--#include lib/metrics
      pcall(count_finished, base, "completed", completed, now_ms, tonumber(metrics_minutes))
      pcall(count_finished, base, "failed", failed, now_ms, tonumber(metrics_minutes))
    end
  end
  if is_plain and found == 0 then
    is_idle, has_delayed = true, false
    if asks_for_wait then ready = 0 end
  end
end

-- Take.
local taken, taken_ids, dropped = {}, {}, nil
local limited_ms, next_due_ms, more = 0, 0, 0
local stopped, is_full = meta[1] and true or false, false -- is_full: by the limit of all workers together
if take > 0 then
  if concurrency then
    active_length = active_length or redis.call("LLEN", active_key)
    local free = concurrency - active_length
    if free < take then take = free end
    if take <= 0 then stopped, is_full = true, true end
  end
  local max = meta[3] and tonumber(meta[3]) or tonumber(limiter_max)
  local started = limiter and tonumber(limiter) or 0
  if max and started >= max or started >= MANUAL_LIMIT then
    local left_ms = redis.call("PTTL", limiter_key)
    if left_ms > 0 then
      limited_ms = left_ms
    else -- at its end, or a counter without end: it would grow for ever, and no window would be opened again
      redis.call("DEL", limiter_key)
      started, limiter = 0, false
    end
  end
  if max and max - started < take then take = max - started end

  if meta[1] and settle_count == 0 then
--#include lib/layout
    ready_line(base) -- a client that was noticed meanwhile may resume at any moment: what waits must stand where it looks
  end
  local may_take = not stopped and limited_ms == 0 and take > 0
  -- One job, as a look behind a blocked read takes it, is moved in one command. Refused when memory is full; RPOP is not, and then
  -- the rest is not either.
  local may_move = may_take and take == 1 and settle_count == 0 and not concurrency
  local moved = may_move and redis.pcall("LMOVE", wait_key, active_key, "RIGHT", "LEFT")
  if type(moved) == "table" then may_move, moved = false, false end
  local candidates = moved and { moved } or may_take and not may_move and redis.call("RPOP", wait_key, take) or {}
  local from_wait, scores, refusal = #candidates, nil, nil
  if is_idle and may_take and from_wait < take then
    ready = 0
  else
    -- Read after the pop, this tells in one command whether work is left and whether anything is delayed.
    local found = redis.call("EXISTS", wait_key, prioritized_key, delayed_key, delayed_key, delayed_key)
    ready = found % 3
    local first = found > 2 and redis.pcall("ZRANGE", delayed_key, 0, 0, "WITHSCORES")
    if first and first.err then
      refusal = first.err .. ": " .. delayed_key
    elseif first and tonumber(first[2]) < (now_ms + 1) * 4096 then
--#include lib/layout
    if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/ready
--#include lib/promote
      -- They go behind all that was popped, so the order is the same as if they had come first.
      local gone = {}
      local is_promoted, promoted = pcall(promote_due, base, now_ms, gone)
      if gone[1] then dropped = gone end
      if not is_promoted then refusal = type(promoted) == "table" and promoted.err or promoted end
      if promoted == 1000 then more = 1 end
      if is_promoted and may_take and from_wait < take then
        for _, job_id in ipairs(redis.call("RPOP", wait_key, take - from_wait) or {}) do candidates[#candidates + 1] = job_id end
        from_wait = #candidates
      end
      ready, is_plain = nil, false
      first = redis.call("ZRANGE", delayed_key, 0, 0, "WITHSCORES")
    end
    has_delayed = first and first[2] ~= nil
    if has_delayed then
      next_due_ms = math.floor(tonumber(first[2]) / 4096)
      -- No time at all, as anybody may have written it. (Below zero is due: if any are left there is `more`.)
      if next_due_ms < 0 or next_due_ms > MANUAL_LIMIT then next_due_ms = 0 end
    end
    if may_take and from_wait < take and ready ~= 0 and not refusal then
      scores = redis.pcall("ZPOPMIN", prioritized_key, take - from_wait)
      if scores.err then refusal = scores.err .. ": " .. prioritized_key end
      for index = 1, #scores, 2 do candidates[#candidates + 1] = scores[index] end
      ready = nil
    end
    if refusal then -- by a key of another type: what was popped goes back, else it would be in no list
      for index = from_wait, 1, -1 do redis.call("RPUSH", wait_key, candidates[index]) end
      if moved then redis.call("LREM", active_key, "1", moved) end
      return redis.error_reply(refusal)
    end
  end

  if may_take then
    local is_short = #candidates < take
    if is_short then ready = 0 end
    local bytes, counted, back_from = 0, 0, #candidates + 1
    for index = 1, #candidates do
      local job_id = candidates[index]
      local job_key = base .. job_id
      local fields = read_taken(job_key)
      if fields.err or not fields[1] then -- an id without a job: dropped, since Node would run it nameless
        dropped = dropped or {}
        if #dropped < MOST_TOLD and string.sub(job_id, 1, 2) ~= "0:" then -- (that is a marker of clients before BullMQ 5)
          dropped[#dropped + 1] = job_id
          dropped[#dropped + 1] = fields.err and "type" or redis.call("EXISTS", job_key) == 1 and "name" or "gone"
        end
      else
        bytes = bytes + #(fields[2] or "")
        if bytes > MOST_BYTES and #taken > 0 then -- over the budget: this one and the rest go back to their places
          ready, back_from = 1, index
          break
        end
        fields[#fields + 1] = job_id
        taken[#taken + 1] = fields
        taken_ids[#taken_ids + 1] = job_id
      end
    end
    if moved then
      if not taken_ids[1] then redis.call("LREM", active_key, "1", moved) end
    elseif taken_ids[1] then
      active_length = redis.pcall("LPUSH", active_key, unpack(taken_ids))
      if type(active_length) == "table" then -- a key of another type: all go back, and nothing was written about any
        refusal, back_from = active_length.err .. ": " .. active_key, 1
      end
    end
    for back = #candidates, back_from, -1 do
      if back > from_wait then
        redis.call("ZADD", prioritized_key, scores[2 * (back - from_wait)], candidates[back])
      else
        redis.call("RPUSH", wait_key, candidates[back])
      end
    end
    if refusal then return redis.error_reply(refusal) end
    for index = 1, #taken do
      local fields, job_id = taken[index], taken_ids[index]
      local job_key = base .. job_id
      local starts = "1"
      if fields[7] then
        local before = tonumber(fields[7])
        if before and before >= 0 and before < 9007199254740990 then starts = string.format("%.0f", before + 1) end
      end
      redis.call("SET", job_key .. ":lock", token, "PX", lock_ms)
      redis.call("HSET", job_key, "processedOn", now_text, "ats", starts, "pb", worker_name)
      redis.pcall("XADD", events_key, "*", "event", "active", "jobId", job_id, "prev", "waiting",
        "attemptsMade", fields[6] or "0", "workerId", worker_name)
      if not fields[9] then counted = counted + 1 end
      fields[7] = starts
    end
    if taken_ids[1] then
      if max and counted > 0 and redis.pcall("INCRBY", limiter_key, counted) == counted then
        redis.pcall("PEXPIRE", limiter_key, limiter_duration_ms ~= "" and limiter_duration_ms or meta[4] or 1000)
      end
    end
    -- Not when something went back: with the counter gone, later jobs would overtake it.
    if ready == 0 and is_short and (priority_counter or not is_plain) then redis.call("DEL", pc_key) end
    if concurrency and #taken_ids >= take and active_length >= concurrency then stopped, is_full = true, true end
  end
end

-- Whoever leaves work behind leaves the marker set, or idle workers sleep for seconds beside it.
if not stopped and (ready or redis.call("EXISTS", wait_key, prioritized_key)) > 0 then
  if limited_ms == 0 then more = 1 end
  redis.pcall("ZADD", base .. "marker", "0", "0")
elseif completed + failed > 0 and #taken == 0 and not stopped and limited_ms == 0
  and (tonumber(limiter) or 0) < (tonumber(meta[3]) or tonumber(limiter_max) or MANUAL_LIMIT) then
  if has_delayed == nil then has_delayed = redis.call("EXISTS", delayed_key) == 1 end
  if not has_delayed then
    active_length = active_length or redis.call("LLEN", active_key)
    if active_length == 0 then redis.pcall("XADD", events_key, "*", "event", "drained") end
  end
end

-- Other clients may free a place of a full queue and set no marker (PyPI bullmq does): nobody would look for seconds.
if is_full and (next_due_ms == 0 or next_due_ms > now_ms + LOOK_AT_FULL_MS) then next_due_ms = now_ms + LOOK_AT_FULL_MS end

-- Also when nothing was taken: a late copy of this call must find its number used, or it takes jobs that nobody waits for.
local outlook = more == 1 and "0\n0\n1\n" or "0\n0\n0\n"
if limited_ms > 0 or next_due_ms > 0 then outlook = string.format("%.0f\n%.0f\n%.0f\n", limited_ms, next_due_ms, more) end
record = call_number .. (active_length and active_length <= SHORT and "s\n" or "\n") .. now_text .. "\n"
  .. table.concat(codes, ",") .. "\n" .. outlook
if #taken > 0 then record = record .. table.concat(taken_ids, "\n") .. "\n" end
redis.pcall("SET", call_key, record, "PX", call_ttl_ms)
return { record, taken, dropped }

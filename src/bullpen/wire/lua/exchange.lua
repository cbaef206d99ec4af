--[[ exchange: settle the jobs that a worker finished and take the next ones, in one step.

  Why one script: each job leaves `active` for exactly one next state, with lock, events and side effects; and what a
  finished job frees (a slot, a parent, a deduplication id) must be visible to the take that follows.
  Redis does not roll back what a script did before it raised. So all hashes are read first; auxiliary structures (events,
  marker, stalled, limiter) are written with pcall, because a foreign key of the wrong type there must not tear a settle in
  half; and each job is settled inside a pcall of its own, so that one bad job harms only itself.
  The first write is LREM or RPOP, which Redis allows when memory is full; the rest of the script is then allowed too.
  A caller that lost the reply repeats its number: it gets the same codes and the same jobs, and nothing is written.

  KEYS   1 meta   2 wait   3 active   4 prioritized   5 pc   6 delayed   7 completed   8 failed   9 stalled
         10 limiter   11 marker   12 events   13 waiting_children   14 call
  ARGV   1 base   2 clock_offset   3 call_number   4 call_ttl_ms   5 token   6 lock_ms   7 take   8 byte_budget
         9 worker_name   10 limiter_max ("" = none)   11 limiter_duration_ms   12 dead_letter_base ("" = none)
         13 metrics_minutes ("" = none)   14 settle_count
         then per settled job: job_id   token   kind   and, by kind:
           completed         rule   value
           failed            rule   reason   stack   stack_limit   attempts   entry_id ("" = no dead letter)
                             entry_name   entry_head   entry_tail   entry_opts   data_form ("" = JSON, "text", "sent" = in the head)
           retry             delay_ms   reason   stack   stack_limit   lifo ("1" or "")
           delayed           delay_ms
           waiting           pause_ms (> 0: also limit the queue that long)
           waiting-children
         rule is "all", "none" or "<count>:<age ms>:<limit>"
  Reply  { now, { code per settled job }, { taken: field values of TAKE_FIELDS …, id }, limited_ms, next_due_ms, more }
         codes: 0 done, 2 done, but the dead letter could not be written, -1 no job, -2 no lock, -3 not active,
         -4 pending children, -6 foreign lock, -9 failed children, -20 something raised, the job is still active
]]
--#include lib/clock
--#include lib/bound
--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/ready
--#include lib/remove
--#include lib/parents
--#include lib/deduplication
--#include lib/failure
--#include lib/letter
--#include lib/retention
--#include lib/metrics
--#include lib/promote

local meta_key, wait_key, active_key, prioritized_key, pc_key, delayed_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local completed_key, failed_key, stalled_key, limiter_key = KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local marker_key, events_key, waiting_children_key, call_key = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local base, call_number, call_ttl_ms, token, lock_ms = ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local take, byte_budget, worker_name = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local dead_letter_base, metrics_minutes, settle_count = ARGV[12], tonumber(ARGV[13]), tonumber(ARGV[14])
local MANUAL_LIMIT = 9007199254740991

local function read_taken(job_id)
  return redis.pcall("HMGET", base .. job_id, "name", "data", "opts", "timestamp", "priority", "atm", "ats", "stc",
    "defa", "parentKey", "rjk", "attemptsMade", "progress")
end

-- One read for the record of the last call, the limiter and all locks: each command costs more than a key.
local ids, kinds, args, string_keys = {}, {}, {}, { call_key, limiter_key }
local arg = 15
local lengths = { completed = 2, failed = 11, retry = 5, delayed = 1, waiting = 1, ["waiting-children"] = 0 }
for index = 1, settle_count do
  local job_id, kind = ARGV[arg], ARGV[arg + 2]
  ids[index], kinds[index], args[index] = job_id, kind, arg + 3
  string_keys[index + 2] = base .. job_id .. ":lock"
  arg = arg + 3 + lengths[kind]
end
local strings = redis.call("MGET", unpack(string_keys))
local record, limiter = strings[1], strings[2]

-- A repeated call: answer from the record. Jobs whose lock is no longer this call's token were lost meanwhile.
if record then
  local number, rest = string.match(record, "^(%d+)\n(.*)$")
  if number == call_number then
    local parts = {}
    for part in string.gmatch(rest, "([^\n]*)\n") do parts[#parts + 1] = part end
    local codes, taken = {}, {}
    for code in string.gmatch(parts[2], "-?%d+") do codes[#codes + 1] = tonumber(code) end
    for index = 6, #parts do
      local job_id = parts[index]
      local fields = redis.call("GET", base .. job_id .. ":lock") == token and read_taken(job_id)
      if fields and not fields.err and fields[1] then
        fields[#fields + 1] = job_id
        taken[#taken + 1] = fields
      end
    end
    return { tonumber(parts[1]), codes, taken, tonumber(parts[3]), tonumber(parts[4]), tonumber(parts[5]) }
  elseif tonumber(number) > tonumber(call_number) then
    return redis.error_reply("BPSTALE a later call of this caller was answered already")
  end
end

local now_ms = server_now(ARGV[2])
local now_text = string.format("%.0f", now_ms) -- once: handing a number to a command formats it each time, for about 0.2 us
local meta = redis.call("HMGET", meta_key, "paused", "concurrency", "max", "duration", "opts.maxLenEvents")
local concurrency, most_events = tonumber(meta[2]), stream_bound(meta[5])
local codes = {}
local completed, failed = 0, 0 -- how many finish in this call

if settle_count > 0 then
  -- Read everything that decides before the first write.
  local child_keys, hashes = {}, {}
  for index = 1, settle_count do
    local job_key = base .. ids[index]
    if kinds[index] == "completed" then
      child_keys[#child_keys + 1] = job_key .. ":dependencies"
      child_keys[#child_keys + 1] = job_key .. ":unsuccessful"
      hashes[index] = redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "failedReason")
    else
      hashes[index] = redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "parent", "priority", "stacktrace", "defa")
    end
  end
  local has_children = #child_keys > 0 and redis.call("EXISTS", unpack(child_keys)) > 0

  local completed_members, failed_members, rules = {}, {}, {}
  local trimmed = false
  local function trim_once()
    if not trimmed then redis.pcall("XTRIM", events_key, "MAXLEN", "~", most_events) end
    trimmed = true
  end

  -- One function per outcome: (job_id, job_key, where its arguments are, its hash, attempts made with this one).
  local settle = {}

  function settle.completed(job_id, job_key, at, hash, made)
    local rule, value = ARGV[at], ARGV[at + 1]
    if hash[4] then finish_deduplication(base, hash[4], job_id, now_ms) end
    if hash[3] then on_child_completed(hash[3], job_key, value, now_ms) end
    if rule == "none" then
      remove_job_keys(job_key)
    else
      redis.call("HSET", job_key, "returnvalue", value, "finishedOn", now_text, "atm", made)
      if hash[5] then redis.call("HDEL", job_key, "failedReason") end
      if rule ~= "all" then rules[rule .. "c"] = completed_key end
      completed_members[#completed_members + 1] = now_text
      completed_members[#completed_members + 1] = job_id
    end
    completed = completed + 1
    if trimmed then
      redis.pcall("XADD", events_key, "*", "event", "completed", "jobId", job_id, "returnvalue", value,
        "prev", "active", "attemptsMade", made)
    else
      redis.pcall("XADD", events_key, "MAXLEN", "~", most_events, "*", "event", "completed", "jobId", job_id,
        "returnvalue", value, "prev", "active", "attemptsMade", made)
      trimmed = true
    end
    return 0
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
      if rule ~= "all" then rules[rule .. "f"] = failed_key end
      failed_members[#failed_members + 1] = now_text
      failed_members[#failed_members + 1] = job_id
    end
    failed = failed + 1
    redis.pcall("XADD", events_key, "*", "event", "failed", "jobId", job_id, "failedReason", reason, "prev", "active",
      "attemptsMade", made)
    if made >= tonumber(ARGV[at + 4]) then
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
    redis.call("ZADD", waiting_children_key, now_ms, job_id)
    redis.pcall("XADD", events_key, "*", "event", "waiting-children", "jobId", job_id, "prev", "active")
    return 0
  end

  -- LREM walks `active` from one end; the latest taken stand first. Among equals the oldest finish first, near the end. Beside
  -- thousands that run for minutes the short ones finish near the front, and from the end each would pass all the others: 10 000
  -- of those made a drain ten times slower. In a long list one job of the batch is sought to choose the end for all.
  local lrem_count = -1
  if redis.call("LLEN", active_key) > 500
    and not redis.call("LPOS", active_key, ids[math.ceil(settle_count / 2)], "RANK", -1, "MAXLEN", 250) then
    lrem_count = 1
  end

  for index = 1, settle_count do
    local job_id, kind, at, hash = ids[index], kinds[index], args[index], hashes[index]
    local job_key = base .. job_id
    local lock = strings[index + 2]
    local code = 0
    if hash.err or not hash[1] then
      code = -1
    elseif not lock then
      code = -2
    elseif lock ~= ARGV[at - 2] then
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
      local is_settled, answer = pcall(settle[kind], job_id, job_key, at, hash, (tonumber(hash[2]) or 0) + 1)
      code = is_settled and answer or -20
      if not is_settled then redis.pcall("LPUSH", active_key, job_id) end
    end
    codes[index] = code
  end

  -- store_finished: put the jobs of one outcome into their set; if that is impossible they stay active, as above.
  local function store_finished(kind, set_key, members)
    if #members == 0 or type(redis.pcall("ZADD", set_key, unpack(members))) == "number" then return end
    for index = 1, settle_count do
      if kinds[index] == kind and codes[index] >= 0 and redis.pcall("EXISTS", base .. ids[index]) == 1 then
        redis.pcall("LPUSH", active_key, ids[index])
        codes[index] = -20
      end
    end
  end
  store_finished("completed", completed_key, completed_members)
  store_finished("failed", failed_key, failed_members)
  local settled_ids, settled_locks = {}, {}
  for index = 1, settle_count do
    if codes[index] >= 0 then
      settled_ids[#settled_ids + 1] = ids[index]
      settled_locks[#settled_locks + 1] = string_keys[index + 2]
    end
  end
  if #settled_ids > 0 then
    redis.call("DEL", unpack(settled_locks))
    redis.pcall("SREM", stalled_key, unpack(settled_ids))
    for rule, set_key in pairs(rules) do
      local needs_letters = dead_letter_base ~= "" and set_key == failed_key
      pcall(apply_retention, base, set_key, string.sub(rule, 1, -2), now_ms, needs_letters)
    end
    if metrics_minutes then
      pcall(count_finished, base, "completed", completed, now_ms, metrics_minutes)
      pcall(count_finished, base, "failed", failed, now_ms, metrics_minutes)
    end
  end
end

-- Take.
local taken, limited_ms, next_due_ms, more = {}, 0, 0, 0
local stopped = meta[1] and true or false
local may_have_more = true -- false once both places for ready jobs are known to be empty
if take > 0 then
  local promoted = 0
  local first = redis.call("ZRANGE", delayed_key, 0, 0, "WITHSCORES")
  if first[2] and tonumber(first[2]) < (now_ms + 1) * 4096 then
    promoted = promote_due(base, now_ms)
    first = redis.call("ZRANGE", delayed_key, 0, 0, "WITHSCORES")
  end
  if concurrency then
    local free = concurrency - redis.call("LLEN", active_key)
    if free < take then take = free end
    if take <= 0 then stopped = true end
  end
  local max = tonumber(meta[3]) or tonumber(ARGV[10])
  local started = tonumber(limiter) or 0
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

  if not stopped and limited_ms == 0 and take > 0 then
    local candidates = redis.call("RPOP", wait_key, take) or {}
    local from_wait = #candidates
    local scores
    if from_wait < take then
      scores = redis.call("ZPOPMIN", prioritized_key, take - from_wait)
      for index = 1, #scores, 2 do candidates[#candidates + 1] = scores[index] end
    end

    may_have_more = #candidates == take
    local taken_ids, bytes, counted = {}, 0, 0
    for index = 1, #candidates do
      local job_id = candidates[index]
      local fields = read_taken(job_id)
      if not fields.err and fields[1] then -- else an id without a job: dropped, since Node would run it nameless
        bytes = bytes + #(fields[2] or "")
        if bytes > byte_budget and #taken > 0 then
          -- Over the budget: this one and the rest go back to their places.
          may_have_more = true
          for back = #candidates, index, -1 do
            if back > from_wait then
              redis.call("ZADD", prioritized_key, scores[2 * (back - from_wait)], candidates[back])
            else
              redis.call("RPUSH", wait_key, candidates[back])
            end
          end
          break
        end
        local starts = (tonumber(fields[7]) or 0) + 1
        redis.call("SET", base .. job_id .. ":lock", token, "PX", lock_ms)
        redis.call("HSET", base .. job_id, "processedOn", now_text, "ats", starts, "pb", worker_name)
        redis.pcall("XADD", events_key, "*", "event", "active", "jobId", job_id, "prev", "waiting",
          "attemptsMade", fields[6] or "0")
        if not fields[9] then counted = counted + 1 end
        fields[7] = starts
        fields[#fields + 1] = job_id
        taken[#taken + 1] = fields
        taken_ids[#taken_ids + 1] = job_id
      end
    end
    if #taken_ids > 0 then
      redis.call("LPUSH", active_key, unpack(taken_ids))
      if max and counted > 0 and redis.pcall("INCRBY", limiter_key, counted) == counted then
        redis.pcall("PEXPIRE", limiter_key, ARGV[11] ~= "" and ARGV[11] or meta[4] or 1000)
      end
    end
    -- Not when something went back: with the counter gone, later jobs would overtake it.
    if not may_have_more then redis.call("DEL", pc_key) end
    if concurrency and #taken_ids >= take and redis.call("LLEN", active_key) >= concurrency then stopped = true end
  end
  if first[2] then next_due_ms = math.floor(tonumber(first[2]) / 4096) end
  if promoted == 1000 then more = 1 end
end

-- Whoever leaves work behind leaves the marker set, or idle workers sleep for seconds beside it.
if not stopped and may_have_more and redis.call("EXISTS", wait_key, prioritized_key) > 0 then
  if limited_ms == 0 then more = 1 end
  redis.pcall("ZADD", marker_key, 0, "0")
elseif completed + failed > 0 and #taken == 0 and not stopped and limited_ms == 0
  and (tonumber(limiter) or 0) < (tonumber(meta[3]) or tonumber(ARGV[10]) or MANUAL_LIMIT)
  and redis.call("EXISTS", active_key, delayed_key) == 0 then
  redis.pcall("XADD", events_key, "*", "event", "drained")
end

-- Also when nothing was taken: a late copy of this call must find its number used, or it takes jobs that nobody waits for.
local lines = { call_number, now_text, table.concat(codes, ","), limited_ms,
  string.format("%.0f", next_due_ms), more }
for index = 1, #taken do lines[index + 6] = taken[index][#taken[index]] end
redis.pcall("SET", call_key, table.concat(lines, "\n") .. "\n", "PX", call_ttl_ms)
return { now_ms, codes, taken, limited_ms, next_due_ms, more }

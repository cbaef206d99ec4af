-- Settle: each finished job leaves `active` for its next state, inside a pcall of its own.

if settle_count > 0 then
--#scope
--#include lib/remove
  -- Read everything that decides before the first write. Keys that are seldom there are asked for in one command.
  local seldom_keys, hashes = { base .. "stalled", delayed_key, prioritized_key }, {}
  -- Who settles one job and wants no other knows of none: `wait` is empty as a rule.
  local asks_for_wait = take == 0 and settle_count == 1
  if asks_for_wait then seldom_keys[4] = wait_key end
  local places_asked = #seldom_keys
  local lanes = meta[6] == "limited" and {} or nil -- of the settled jobs, by their place: a finished job may be gone below
  for index = 1, settle_count do
    local at = places[index]
    local job_key = base .. ARGV[at]
    if ARGV[at + 2] == "completed" then
      seldom_keys[#seldom_keys + 1] = job_key .. ":dependencies"
      seldom_keys[#seldom_keys + 1] = job_key .. ":unsuccessful"
      local hash = lanes and redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "failedReason", "bplane")
        or redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "failedReason")
      if lanes then lanes[index] = hash[6] end
      if hash[3] or hash[4] then is_plain = false end
      hashes[index] = hash
    else
      hashes[index] = redis.pcall("HMGET", job_key, "name", "atm", "parentKey", "deid", "parent", "priority", "stacktrace", "defa",
        "bplane")
      if lanes then lanes[index] = hashes[index][9] end
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
--#scope
--#include lib/layout
    if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/deduplication
--#include lib/failure
--#include lib/cancelled
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
      local is_cancelled = was_cancelled(hash[8], reason)
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
        if hash[8] then redis.call("HDEL", job_key, "defa", is_cancelled and "defa" or "bpcancel") end
        if rule ~= "all" then
          rules = rules or {}
          rules[rule .. "f"] = "failed"
        end
        failed_members[#failed_members + 1] = now_text
        failed_members[#failed_members + 1] = job_id
      end
      failed = failed + 1
      local is_text, stack = pcall(cjson.decode, ARGV[at + 2])
      stack = is_text and type(stack) == "string" and stack or ""
      if is_cancelled then
        redis.pcall("XADD", events_key, "*", "event", "failed", "jobId", job_id, "failedReason", reason, "prev", "active",
          "attemptsMade", made, "stacktrace", stack, "cancelled", "1")
      else
        redis.pcall("XADD", events_key, "*", "event", "failed", "jobId", job_id, "failedReason", reason, "prev", "active",
          "attemptsMade", made, "stacktrace", stack)
      end
      if tonumber(made) >= tonumber(ARGV[at + 4]) then
        redis.pcall("XADD", events_key, "*", "event", "retries-exhausted", "jobId", job_id, "attemptsMade", made)
      end
      return code
    end

    function settle.retry(job_id, job_key, at, hash, made)
      local delay_ms = hash[8] and 0 or tonumber(ARGV[at]) -- somebody has decided its failure: it need not wait for that
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

    -- The job keeps its turn, no attempt is counted.
    local function give_back(job_id, hash)
      trim_once()
      place_ready(base, job_id, priority_class(hash[6]), true, true)
      redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "active")
      return 0
    end

    function settle.delayed(job_id, job_key, at, hash)
      if hash[8] then return give_back(job_id, hash) end
      trim_once()
      redis.call("HSET", job_key, "delay", ARGV[at])
      place_delayed(base, job_id, now_ms + tonumber(ARGV[at]))
      wake_when_due(base)
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
      if hash[8] or redis.call("SCARD", job_key .. ":dependencies") == 0 then return give_back(job_id, hash) end
      trim_once()
      redis.call("ZADD", base .. "waiting-children", now_ms, job_id)
      redis.pcall("XADD", events_key, "*", "event", "waiting-children", "jobId", job_id, "prev", "active")
      return 0
    end
--#end
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
--#scope
--#include lib/layout
      if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/retention
      is_plain = false -- what goes may be a child, and its parent free to run
      for rule, set_name in pairs(rules) do
        local needs_letters = dead_letter_base ~= "" and set_name == "failed"
        pcall(apply_retention, base, base .. set_name, string.sub(rule, 1, -2), now_ms, needs_letters)
      end
--#end
    end
    if metrics_minutes ~= "" then
--#scope
--#include lib/metrics
      pcall(count_finished, base, "completed", completed, now_ms, tonumber(metrics_minutes))
      pcall(count_finished, base, "failed", failed, now_ms, tonumber(metrics_minutes))
--#end
    end
  end
  if lanes then
--#scope
--#include lib/layout
    if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/lane_limits
    local ended = {}
    for index = 1, settle_count do
      local lane = lanes[index]
      if lane and codes[index] >= 0 then
        ended[lane] = ended[lane] or {}
        table.insert(ended[lane], ARGV[places[index]])
      end
    end
    local holds = any_lane_holds(base)
    for lane, job_ids in pairs(ended) do
      if as_number(redis.pcall("ZREM", base .. "bp:running:" .. lane, unpack(job_ids))) > 0 and holds then
        pcall(release_held, base, lane, now_ms)
      end
    end
--#end
  end
  if is_plain and found == 0 then
    is_idle, has_delayed = true, false
    if asks_for_wait then ready = 0 end
  end
--#end
end

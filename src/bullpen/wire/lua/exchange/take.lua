-- Take: due jobs are promoted, the next ones move to `active` under this caller's lock.

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
--#scope
--#include lib/layout
    ready_line(base) -- a client that was noticed meanwhile may resume at any moment: what waits must stand where it looks
--#end
  end
  local may_take = not stopped and limited_ms == 0 and take > 0
  -- Limits of lanes: what is to be done about those that start; when to look again; whether more may be in line than was looked at.
  local start_lanes, look_at_lanes_ms, is_cut
  -- One job, as a look behind a blocked read takes it, is moved in one command. Refused when memory is full; RPOP is not, and then
  -- the rest is not either.
  local may_move = may_take and take == 1 and settle_count == 0 and not concurrency and meta[6] ~= "limited"
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
--#scope
--#include lib/layout
      if not meta[1] then line_of[base] = wait_key end -- known already
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
--#end
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
      if settle_count == 0 then return redis.error_reply(refusal) end
      may_take, ready = false, 1 -- what was settled is told; the next call, which settles nothing, is refused
    end
  end

  if may_take and meta[6] == "limited" then
--#scope
--#include exchange/lanes
--#end
  end
  if may_take then
    local is_short = #candidates < take and not is_cut
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
      if start_lanes then start_lanes() end
      if max and counted > 0 and redis.pcall("INCRBY", limiter_key, counted) == counted then
        redis.pcall("PEXPIRE", limiter_key, limiter_duration_ms ~= "" and limiter_duration_ms or meta[4] or 1000)
      end
    end
    local last_score = meta[6] and scores and #scores > 0 and tonumber(scores[#scores])
    if last_score then -- lanes: the class has got here, see lib/lane_tags
      local class = math.floor(last_score / 4294967296)
      local tag = last_score - class * 4294967296
      local turn, counter = math.floor(tag), tonumber(priority_counter) or 0
      if turn ~= counter then -- within a turn nobody is ahead of anybody by as much as one job
        redis.pcall("ZADD", base .. "bp:lanes:" .. string.format("%d", class), "XX", "GT", string.format("%.17g", tag), "")
      end
      if turn > counter then
        priority_counter = string.format("%d", turn)
        redis.pcall("SET", pc_key, priority_counter)
      end
    end
    -- Not when something went back: with the counter gone, later jobs would overtake it.
    if ready == 0 and is_short and (priority_counter or not is_plain) then redis.call("DEL", pc_key) end
    if concurrency and #taken_ids >= take and active_length >= concurrency then stopped, is_full = true, true end
  end
  if look_at_lanes_ms and (next_due_ms == 0 or look_at_lanes_ms < next_due_ms) then next_due_ms = math.max(look_at_lanes_ms, now_ms) end
end

-- Answer: wake whoever finds the rest, store the record of this call, reply.

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

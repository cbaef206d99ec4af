-- count_finished: add jobs that finished in this call to the figures per minute, as every BullMQ client keeps them. The newest
-- minute stands at the head of the list and is written when a job finishes in a later one; minutes without any are zeros.
local function count_finished(base, kind, finished, now_ms, minutes_kept)
  if finished == 0 then return end
  local key = base .. "metrics:" .. kind
  local before = redis.call("HINCRBY", key, "count", finished) - finished
  local previous = redis.call("HMGET", key, "prevTS", "prevCount")
  local previous_ms, previous_count = tonumber(previous[1]), tonumber(previous[2]) or 0
  if not previous_ms then
    redis.call("HSET", key, "prevTS", now_ms, "prevCount", 0)
    return
  end
  local minutes = math.min(math.floor(now_ms / 60000) - math.floor(previous_ms / 60000), minutes_kept)
  if minutes < 1 then return end
  local points = { before - previous_count }
  for minute = 2, minutes do points[minute] = 0 end
  for first = 1, minutes, 5000 do -- Lua passes at most some 8000 arguments
    redis.call("LPUSH", key .. ":data", unpack(points, first, math.min(first + 4999, minutes)))
  end
  redis.call("LTRIM", key .. ":data", 0, minutes_kept - 1)
  redis.call("HSET", key, "prevCount", before, "prevTS", now_ms)
end

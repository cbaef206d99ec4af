--[[ check_stalled: return jobs of dead workers to the front of the line.

  Two phases, as every BullMQ client does: what is active now is marked; what was marked by an earlier check, was not renewed
  since and has no lock any more, is stalled. The gate key lets one check run per interval over all workers and clients.
  Work per call is bounded; the caller goes on with continuing = "1" while the reply says that candidates are left.
  A stall is no attempt and condemns nobody here: `stc` counts it, and the worker that takes the job decides.
  A check that comes much too late shows that the server was away, or its clock has jumped: then locks have run out that their
  workers could not renew. They get the time to take them again before anything counts as stalled. A shorter outage makes no
  check late, but whoever checks may have met it (`wary`): with an interval as long as the lock that is the only sign.

  A queue in which nothing runs has nobody to save. It is checked less often, but within the time of a lock: what is taken meanwhile is
  marked before its lock can end, so it comes back as soon as ever.

  KEYS   1 meta   2 wait   3 active   4 stalled   5 stalled_check   6 events
  ARGV   1 base   2 clock_offset   3 interval_ms   4 continuing ("1" or "")   5 lock_ms   6 wary ("1" or "")
         7 idle_ms
  Reply  { candidates left (0 or 1), { ids returned to wait }, ms until the next check may run, { their names } }
]]
--#include lib/clock
--#include lib/bound
--#include lib/wake
--#include lib/layout

local meta_key, wait_key, active_key, stalled_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local gate_key, events_key = KEYS[5], KEYS[6]
local base, interval_ms, continuing, lock_ms = ARGV[1], tonumber(ARGV[3]), ARGV[4] == "1", tonumber(ARGV[5])
local MOST_PER_CALL = 500

-- After an outage each worker renews within a quarter of its lock, or a little later when it has to connect first.
local pause_ms, is_patient = interval_ms, false
if not continuing then
  local closed_ms = redis.call("PTTL", gate_key)
  if closed_ms ~= -2 then return { 0, {}, closed_ms > 0 and closed_ms or interval_ms, {} } end
  redis.call("DEL", gate_key) -- a write that Redis allows when memory is full; the rest of the script is then allowed too
  if redis.call("EXISTS", active_key) == 0 then
    local known, idle_ms = redis.call("HMGET", meta_key, "bpcheck", "opts.maxLenEvents"), tonumber(ARGV[7]) or interval_ms
    if known[1] then redis.call("HDEL", meta_key, "bpcheck") end -- else the next check would pass for one that comes too late
    redis.call("SET", gate_key, "idle", "PX", idle_ms)
    redis.pcall("XTRIM", events_key, "MAXLEN", "~", stream_bound(known[2]))
    return { 0, {}, idle_ms, {} }
  end
  local now_ms = server_now("0") -- locks know nothing of the test clock
  local planned_ms = tonumber(redis.call("HGET", meta_key, "bpcheck"))
  if ARGV[6] == "1" or (planned_ms and now_ms - planned_ms > math.max(500, lock_ms / 2)) then
    is_patient, pause_ms = true, math.ceil(lock_ms / 3) + 1000
  end
  if redis.call("EXISTS", meta_key) == 1 then
    redis.pcall("HSET", meta_key, "bpcheck", string.format("%.0f", now_ms + pause_ms))
  end
  redis.call("SET", gate_key, server_now(ARGV[2]), "PX", pause_ms)
  redis.pcall("XTRIM", events_key, "MAXLEN", "~", stream_bound(redis.call("HGET", meta_key, "opts.maxLenEvents")))
end

local recovered, names, freed = {}, {}, 0
if redis.call("HEXISTS", meta_key, "paused") == 0 then line_of[base] = wait_key end
local candidates = is_patient and {} or redis.call("SPOP", stalled_key, MOST_PER_CALL)
if candidates[2] then -- each goes before those that went back already, so what was taken last goes first
  local place = {}
  for index, job_id in ipairs(redis.call("LRANGE", active_key, 0, -1)) do place[job_id] = index end
  table.sort(candidates, function(one, other) return (place[one] or 0) < (place[other] or 0) end)
end
if candidates[1] then redis.call("LLEN", ready_line(base)) end -- raises before a job has left `active`, if it can go nowhere
for _, job_id in ipairs(candidates) do
  local job_key = base .. job_id
  if redis.call("EXISTS", job_key .. ":lock") == 0 and redis.call("LREM", active_key, -1, job_id) > 0 then
    freed = freed + 1
    local name = redis.pcall("HGET", job_key, "name")
    if type(name) == "string" then -- else an id without a job: dropped, its place in active is free
      -- A count that is no number would end the script here, with the job in no list; it counts as many.
      if type(redis.pcall("HINCRBY", job_key, "stc", 1)) ~= "number" then redis.call("HSET", job_key, "stc", 1000000) end
      redis.call("RPUSH", ready_line(base), job_id)
      redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "active")
      redis.pcall("XADD", events_key, "*", "event", "stalled", "jobId", job_id,
        "attemptsMade", redis.call("HGET", job_key, "atm") or 0)
      recovered[#recovered + 1], names[#names + 1] = job_id, name
    end
  end
end
if freed > 0 then wake(base) end
if #candidates == MOST_PER_CALL then return { 1, recovered, pause_ms, names } end

local active = redis.call("LRANGE", active_key, 0, -1)
for first = 1, #active, 7000 do
  redis.call("SADD", stalled_key, unpack(active, first, math.min(first + 6999, #active)))
end
return { 0, recovered, pause_ms, names }

--[[ check_stalled: return jobs of dead workers to the front of the line.

  Two phases, as every BullMQ client does: what is active now is marked; what was marked by an earlier check, was not renewed
  since and has no lock any more, is stalled. The gate key lets one check run per interval over all workers and clients.
  Work per call is bounded; the caller goes on with continuing = "1" while the reply says that candidates are left.
  A stall is no attempt and condemns nobody here: `stc` counts it, and the worker that takes the job decides.

  KEYS   1 meta   2 wait   3 active   4 stalled   5 stalled_check   6 events
  ARGV   1 base   2 clock_offset   3 interval_ms   4 continuing ("1" or "")
  Reply  { candidates left (0 or 1), { ids returned to wait } }, or { 0, {} } when the gate is closed
]]
--#include lib/clock
--#include lib/bound
--#include lib/wake
--#include lib/layout

local meta_key, wait_key, active_key, stalled_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local gate_key, events_key = KEYS[5], KEYS[6]
local base, interval_ms, continuing = ARGV[1], ARGV[3], ARGV[4] == "1"
local MOST_PER_CALL = 500

if not continuing then
  if redis.call("EXISTS", gate_key) == 1 then return { 0, {} } end
  redis.call("DEL", gate_key) -- a write that Redis allows when memory is full; the rest of the script is then allowed too
  redis.call("SET", gate_key, server_now(ARGV[2]), "PX", interval_ms)
  redis.pcall("XTRIM", events_key, "MAXLEN", "~", stream_bound(redis.call("HGET", meta_key, "opts.maxLenEvents")))
end

local recovered, freed = {}, 0
if redis.call("HEXISTS", meta_key, "paused") == 0 then line_of[base] = wait_key end
local candidates = redis.call("SPOP", stalled_key, MOST_PER_CALL)
for _, job_id in ipairs(candidates) do
  local job_key = base .. job_id
  if redis.call("EXISTS", job_key .. ":lock") == 0 and redis.call("LREM", active_key, -1, job_id) > 0 then
    freed = freed + 1
    if redis.pcall("HEXISTS", job_key, "name") == 1 then -- else an id without a job: dropped, its place in active is free
      redis.call("HINCRBY", job_key, "stc", 1)
      redis.call("RPUSH", ready_line(base), job_id)
      redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id, "prev", "active")
      redis.pcall("XADD", events_key, "*", "event", "stalled", "jobId", job_id,
        "attemptsMade", redis.call("HGET", job_key, "atm") or 0)
      recovered[#recovered + 1] = job_id
    end
  end
end
if freed > 0 then wake(base) end
if #candidates == MOST_PER_CALL then return { 1, recovered } end

local active = redis.call("LRANGE", active_key, 0, -1)
for first = 1, #active, 7000 do
  redis.call("SADD", stalled_key, unpack(active, first, math.min(first + 6999, #active)))
end
return { 0, recovered }

--[[ clean: delete jobs of one state that are older than a grace period: one step.

  Age is counted from the latest thing that happened to the job: finishing, beginning, being created. A job that runs is left alone,
  and so is the one that a scheduler made last. The step begins after `start` jobs that earlier steps looked at and left.

  KEYS   1 state_key
  ARGV   1 base   2 clock_offset   3 state   4 grace_ms   5 start   6 most (jobs to remove at most)   7 is_first ("1" or "")
  Reply  { start of the next step, or -1 when all were looked at, { ids removed } }
]]
--#include lib/clock
--#include lib/trim
--#include lib/removal

local state_key = KEYS[1]
local base, state, start, most, is_first = ARGV[1], ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == "1"
local now_ms = server_now(ARGV[2])
local oldest_to_keep_ms = now_ms - tonumber(ARGV[4])
local LOOKED_AT_PER_CALL = 500
local IS_LIST = { wait = true, paused = true, active = true }
local TOMBSTONE = "" -- never an id, and gone before this script ends

local ids
if IS_LIST[state] then
  ids = redis.call("LRANGE", state_key, -start - LOOKED_AT_PER_CALL, -start - 1)
elseif state == "completed" or state == "failed" then
  ids = redis.call("ZRANGEBYSCORE", state_key, "-inf", oldest_to_keep_ms, "LIMIT", start, LOOKED_AT_PER_CALL)
else
  ids = redis.call("ZRANGE", state_key, start, start + LOOKED_AT_PER_CALL - 1)
end

local function is_old(job_id, fields)
  if state == "completed" or state == "failed" then return true end -- the range said so
  if state == "active" and redis.call("EXISTS", base .. job_id .. ":lock") == 1 then return false end
  local since
  if state == "prioritized" then
    since = tonumber(fields[6])
  elseif state == "delayed" then
    since = tonumber(fields[5]) or tonumber(fields[6])
  else
    since = tonumber(fields[4]) or tonumber(fields[5]) or tonumber(fields[6])
  end
  return since and since <= oldest_to_keep_ms
end

-- Lists are read from their tail, which is the oldest end; `position` is the place in `ids`.
local doomed, hashes, looked_at = {}, {}, 0
local first, last, step = 1, #ids, 1
if IS_LIST[state] then first, last, step = #ids, 1, -1 end
for position = first, last, step do
  if #doomed == most then break end
  looked_at = looked_at + 1
  local job_id = ids[position]
  local fields = redis.pcall("HMGET", base .. job_id, "rjk", "parentKey", "deid", "finishedOn", "processedOn", "timestamp")
  if fields.err or (is_old(job_id, fields) and not is_current_iteration(base, job_id, fields[1])) then
    doomed[#doomed + 1] = job_id
    hashes[#doomed] = fields
    if IS_LIST[state] then redis.call("LSET", state_key, position - 1 - start - #ids, TOMBSTONE) end
  end
end

if #doomed > 0 then
  trim_events(base)
  if IS_LIST[state] then
    redis.call("LREM", state_key, -#doomed, TOMBSTONE)
  else
    redis.call("ZREM", state_key, unpack(doomed))
  end
  if state == "active" then redis.pcall("SREM", base .. "stalled", unpack(doomed)) end
  for index, job_id in ipairs(doomed) do
    local fields = hashes[index]
    delete_job(base, job_id, fields[3])
    if fields[2] then bury_with_parent(base, fields[2], base .. job_id, now_ms) end
  end
end
if #doomed > 0 or is_first then
  redis.pcall("XADD", base .. "events", "*", "event", "cleaned", "count", #doomed)
end
local next_start = start + looked_at - #doomed
if looked_at == #ids and #ids < LOOKED_AT_PER_CALL then next_start = -1 end
return { next_start, doomed }

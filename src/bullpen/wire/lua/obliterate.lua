--[[ obliterate: delete a paused queue with everything in it: one step.

  Parents that wait in other queues for jobs of this one are released; other clients leave them waiting for ever. When the last job
  is gone the queue's own keys go, the limiter included.

  KEYS   1 meta   2 active   3 repeat
  ARGV   1 base   2 clock_offset   3 force ("1" or "")   4 most (jobs per step)
  Reply  { more (0 or 1), number of jobs removed }, or -1 the queue is not paused, -2 jobs are running and force was not given
]]
--#include lib/clock
--#include lib/removal
--#include lib/letter_index

local meta_key, active_key, repeat_key = KEYS[1], KEYS[2], KEYS[3]
local base, force, most_per_call = ARGV[1], ARGV[3] == "1", tonumber(ARGV[4])
local now_ms = server_now(ARGV[2])

-- After the last step there is no meta any more: a repeated call finds nothing to do.
if redis.call("EXISTS", meta_key) == 1 and redis.call("HEXISTS", meta_key, "paused") == 0 then return -1 end
if not force and redis.call("LLEN", active_key) > 0 then return -2 end

local removed, holds_letters = 0, redis.call("EXISTS", base .. "bp:letters:facts") == 1
local function obliterate(state, is_list)
  local state_key, left = base .. state, most_per_call - removed
  local ids
  if is_list then
    ids = redis.call("LRANGE", state_key, 0, left - 1)
    redis.call("LTRIM", state_key, #ids, -1)
  else
    ids = redis.call("ZRANGE", state_key, 0, left - 1)
    redis.call("ZREMRANGEBYRANK", state_key, 0, left - 1)
  end
  for _, job_id in ipairs(ids) do
    local job_key = base .. job_id
    local fields = redis.pcall("HMGET", job_key, "parentKey", "deid", "bplane", "priority")
    if fields[3] then
      redis.call("UNLINK", base .. "bp:held:" .. fields[3], base .. "bp:running:" .. fields[3], base .. "bp:rate:" .. fields[3],
        base .. "bp:size:" .. fields[3], base .. "bp:lanes:" .. (fields[4] or ""))
    end
    delete_job(base, job_id, fields[2])
    if holds_letters then unindex_letter(base, job_id) end
    redis.call("DEL", job_key .. ":lock")
    if fields[1] and split_key(fields[1]) ~= base then on_child_removed(fields[1], job_key, now_ms) end
  end
  removed = removed + #ids
  return removed < most_per_call
end

for _, state in ipairs({ "active", "wait", "paused" }) do
  if not obliterate(state, true) then return { 1, removed } end
end
for _, state in ipairs({ "delayed", "prioritized", "waiting-children", "completed", "failed" }) do
  if not obliterate(state, false) then return { 1, removed } end
end

local schedulers = redis.call("ZRANGE", repeat_key, 0, most_per_call - 1)
for _, scheduler_id in ipairs(schedulers) do redis.call("DEL", base .. "repeat:" .. scheduler_id) end
redis.call("ZREMRANGEBYRANK", repeat_key, 0, most_per_call - 1)
if #schedulers == most_per_call then return { 1, removed } end

for _, suffix in ipairs({ "events", "id", "pc", "marker", "meta", "metrics:completed", "metrics:completed:data", "metrics:failed",
  "metrics:failed:data", "stalled", "stalled-check", "limiter", "delay", "priority", "bp:lanes:held", "bp:letters:facts",
  "bp:letters:index", "bp:letters:counts", "bp:letters:causes", "bp:letters:tenants", "bp:letters:checked" }) do
  redis.call("UNLINK", base .. suffix)
end
return { 0, removed }

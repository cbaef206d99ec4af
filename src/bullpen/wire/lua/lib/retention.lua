--#include lib/remove
--#include lib/parents
--#include lib/letter
--#include lib/cancelled

-- drop_finished: delete finished jobs. Exactly the members whose hashes were deleted leave the set, or ids without jobs would
-- stay behind. A member whose key is no hash goes too: one of them would keep all others for good.
local function drop_finished(base, set_key, doomed, now_ms)
  if #doomed == 0 then return end
  for _, job_id in ipairs(doomed) do
    local job_key = base .. job_id
    local parent_key = redis.pcall("HGET", job_key, "parentKey")
    remove_job_keys(job_key)
    if type(parent_key) == "string" then on_child_removed(parent_key, job_key, now_ms) end
  end
  redis.call("ZREM", set_key, unpack(doomed))
end

-- without_unlettered: of these failed jobs, those that may go: they have their dead letter, were cancelled, or are so old that no sweep
-- would offer one any more.
local function without_unlettered(base, set_key, ids, now_ms)
  local from_ms, free = swept_until(base, now_ms) or -3600000, {}
  for _, job_id in ipairs(ids) do
    local fields = redis.pcall("HMGET", base .. job_id, "bpdl", "ats", "name", "bpcancel", "failedReason")
    local needs_none = was_cancelled(fields[4], fields[5]) or has_letter(fields[1], fields[2])
    if not fields[3] or needs_none or tonumber(redis.call("ZSCORE", set_key, job_id)) < from_ms then
      free[#free + 1] = job_id
    end
  end
  return free
end

-- Finished jobs that one call still looks at, over all its rules: an unbounded purge blocked whole servers, and a batch may bring as
-- many rules as jobs. A thousand take 10 to 20 ms.
local retention_left = 1000

-- apply_retention: drop finished jobs beyond the rule "<count>:<age ms>:<limit>", -1 meaning no bound; both bounds hold.
-- The next finish goes on where this one stopped. needs_letters: jobs that wait for their dead letter stay.
local function apply_retention(base, set_key, rule, now_ms, needs_letters)
  local count, age_ms, limit = string.match(rule, "^(-?%d+):(-?%d+):(-?%d+)$")
  count, age_ms, limit = tonumber(count), tonumber(age_ms), tonumber(limit)
  if limit < 1 or limit > retention_left then limit = retention_left end
  if age_ms >= 0 and limit > 0 then
    local aged = redis.call("ZREVRANGEBYSCORE", set_key, now_ms - age_ms, 0, "LIMIT", 0, limit)
    retention_left = retention_left - #aged
    if needs_letters then aged = without_unlettered(base, set_key, aged, now_ms) end
    drop_finished(base, set_key, aged, now_ms)
  end
  if count >= 0 then
    local excess = math.min(redis.call("ZCARD", set_key) - count, retention_left)
    if excess > 0 then
      local oldest = redis.call("ZRANGE", set_key, 0, excess - 1)
      retention_left = retention_left - #oldest
      if needs_letters then oldest = without_unlettered(base, set_key, oldest, now_ms) end
      drop_finished(base, set_key, oldest, now_ms)
    end
  end
end

--#include lib/remove

-- pending_place: where a scheduler's job waits for its time or its turn: the key, or nil when it runs, has run or is gone. A line is
-- searched as a whole: nobody may run the job after its scheduler was changed, and schedulers are changed by hand, not by the thousand.
local function pending_place(base, job_id)
  if redis.call("EXISTS", base .. job_id) == 0 then return nil end
  for _, state in ipairs({ "delayed", "prioritized" }) do
    if redis.call("ZSCORE", base .. state, job_id) then return base .. state end
  end
  for _, line in ipairs({ "wait", "paused" }) do -- the second is where older clients put them while the queue is paused
    if redis.call("LPOS", base .. line, job_id) then return base .. line end
  end
  return nil
end

-- take_pending: delete such a job.
local function take_pending(base, job_id, place)
  if place == base .. "delayed" or place == base .. "prioritized" then
    redis.call("ZREM", place, job_id)
  else
    redis.call("LREM", place, 1, job_id)
  end
  remove_job_keys(base .. job_id)
end

--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/ready

-- place_iteration: store a scheduler's job for the time `slot` and put it where it belongs. `opts_head` is its options up to the time
-- in its id. `later_ms` is chance: the job comes so much after its time, if that is not now.
local function place_iteration(base, job, now_ms)
  local job_id, events_key = job.id, base .. "events"
  local delay_ms = math.max(0, job.slot - now_ms)
  if delay_ms > 0 then delay_ms = delay_ms + job.later_ms end
  local opts = job.opts_head .. string.format('%.0f","delay":%.0f,"timestamp":%.0f', job.slot, delay_ms, now_ms)
  if job.names_time then opts = opts .. string.format(',"prevMillis":%.0f', job.slot) end
  redis.call("HSET", base .. job_id, "name", job.name, "data", job.data, "opts", opts .. "}",
    "timestamp", string.format("%.0f", now_ms), "delay", string.format("%.0f", delay_ms), "priority", job.priority,
    "rjk", job.scheduler_id)
  name_lane(base, job_id, opts .. "}")
  if job.is_ours then redis.call("HSET", base .. job_id, "bp", "1") end
  redis.pcall("XADD", events_key, "*", "event", "added", "jobId", job_id, "name", job.name)
  if delay_ms > 0 then
    place_delayed(base, job_id, now_ms + delay_ms)
    wake_when_due(base)
  else
    place_ready(base, job_id, job.priority, job.at_front)
    wake(base)
    redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id)
  end
end

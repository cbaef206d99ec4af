--#include lib/if_typed
--#include lib/leave_line

-- leave_state: take the id out of the one structure that holds it; returns that structure's name, or nil.
-- Lists last, the longest of them at the end.
local function leave_state(base, job_id, only_likely)
  for _, state in ipairs({ "completed", "failed", "delayed", "prioritized", "waiting-children" }) do
    if if_typed("ZREM", base .. state, job_id) == 1 then return state end
  end
  for _, state in ipairs({ "active", "paused", "wait" }) do
    if leave_line(base, base .. state, job_id, only_likely) then return state end
  end
  return nil
end

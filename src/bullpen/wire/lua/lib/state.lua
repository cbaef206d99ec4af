--#include lib/line
--#include lib/sets

-- state_of: the one state structure that holds the id, by its wire name, or "unknown".
-- Nil when only a search through a line of very many could tell: the job then waits in it, or nothing lists the job.
local function state_of(base, job_id)
  local state = set_of(base, job_id)
  if state then return state end
  local all_certain = true
  for _, line in ipairs({ "active", "wait", "paused" }) do
    local index, is_certain = find_in_line(base, base .. line, job_id)
    if index then return line == "active" and "active" or "waiting" end
    all_certain = all_certain and is_certain
  end
  return all_certain and "unknown" or nil
end

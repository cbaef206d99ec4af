--#include lib/if_typed

-- set_of: the sorted set that holds the id, which is its state by its wire name, or nil.
local function set_of(base, job_id)
  for _, state in ipairs({ "completed", "failed", "delayed", "prioritized", "waiting-children" }) do
    if if_typed("ZSCORE", base .. state, job_id) then return state end
  end
  return nil
end

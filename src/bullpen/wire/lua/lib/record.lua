--#include lib/if_typed

-- is_record: whether a hash that the id leads to is no job but a record of the queue: its settings and figures, a scheduler, the
-- follow-up of a deduplication id. Ids come from whoever asks, and jobs of other clients may have nearly any.
local function is_record(base, job_id)
  if job_id == "meta" or string.sub(job_id, 1, 8) == "metrics:" then return true end
  local scheduler_id = string.match(job_id, "^repeat:(.*)$")
  if scheduler_id then
    return if_typed("HEXISTS", base .. job_id, "ic") == 1 or type(if_typed("ZSCORE", base .. "repeat", scheduler_id)) == "string"
  end
  return string.sub(job_id, 1, 3) == "dn:" and if_typed("HEXISTS", base .. job_id, "timestamp") == 0
end

--#include lib/line

-- leave_line: take a job out of a line. Needs lib/line. From the nearer end, so that half of the line is passed at most; only a job
-- that stands in no order in a long line costs a search from the running end on. `only_likely` does without that search.
local function leave_line(base, line_key, job_id, only_likely)
  local index, is_certain = find_in_line(base, line_key, job_id)
  if not index and (is_certain or only_likely) then return false end
  local from_left = index and index < redis.call("LLEN", line_key) / 2
  return redis.call("LREM", line_key, from_left and 1 or -1, job_id) > 0
end

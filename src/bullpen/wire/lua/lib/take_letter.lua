-- take_letter_away: delete the dead letter of a job that goes back in line: left behind, it would ask again for a job that may be
-- done by then. Needs lib/leave_line. Returns what it cost in jobs: to take one out of a long list, it is passed up to that place.
local function take_letter_away(dead_letter_base, entry_id)
  local wait_key, cost = dead_letter_base .. "wait", 1
  if redis.call("EXISTS", dead_letter_base .. entry_id) == 0 then return 0 end
  if not redis.call("LPOS", wait_key, entry_id, "RANK", -1, "MAXLEN", 1000) then
    cost = redis.call("LLEN", wait_key) / 1000
  end
  if leave_line(dead_letter_base, wait_key, entry_id) then
    remove_job_keys(dead_letter_base .. entry_id)
    redis.pcall("XADD", dead_letter_base .. "events", "*", "event", "removed", "jobId", entry_id, "prev", "wait")
  end
  return cost
end

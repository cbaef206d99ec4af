--#include lib/remove
--#include lib/leave_line
--#include lib/letter_index

-- take_letter_away: delete the dead letter of a job that goes back in line: left behind, it would ask again for a job that may be
-- done by then. Returns what it cost in jobs: to take one out of a long list, it is passed up to that place.
-- Queues may share a store of letters, and which letter a job names, its producer may have written: only one of this queue goes.
local function take_letter_away(base, dead_letter_base, entry_id)
  local wait_key, cost = dead_letter_base .. "wait", 1
  local data = redis.pcall("HGET", dead_letter_base .. entry_id, "data")
  if type(data) ~= "string" then return 0 end
  local readable, entry = pcall(cjson.decode, data)
  if not readable or type(entry) ~= "table" or entry.originalQueue ~= string.match(base, "([^:]*):$") then return 0 end
  local place = redis.pcall("LPOS", wait_key, entry_id, "RANK", -1, "MAXLEN", 1000)
  if type(place) == "table" then return 0 end -- no list: the letter stays, and the sweep of letters looks at it again
  if not place then cost = redis.call("LLEN", wait_key) / 1000 end
  if leave_line(dead_letter_base, wait_key, entry_id) then
    remove_job_keys(dead_letter_base .. entry_id)
    unindex_letter(dead_letter_base, entry_id)
    redis.pcall("XADD", dead_letter_base .. "events", "*", "event", "removed", "jobId", entry_id, "prev", "wait")
  end
  return cost
end

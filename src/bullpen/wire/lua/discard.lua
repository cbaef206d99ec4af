--[[ discard: delete a dead letter for good. The failed job it speaks of stays where it is.

  KEYS   1 entry   2 entry_wait   3 entry_events
  ARGV   1 base   2 entry_id
  Reply  1 discarded, 0 there was none
]]
--#include lib/remove
--#include lib/leave_line
--#include lib/letter_index

local entry_key, entry_wait_key, entry_events_key = KEYS[1], KEYS[2], KEYS[3]
local base, entry_id = ARGV[1], ARGV[2]

if not leave_line(base, entry_wait_key, entry_id) then return 0 end
remove_job_keys(entry_key)
unindex_letter(base, entry_id)
redis.call("XADD", entry_events_key, "*", "event", "removed", "jobId", entry_id, "prev", "wait")
return 1

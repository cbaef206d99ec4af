--[[ discard: delete a dead letter for good. The failed job it speaks of stays where it is.

  KEYS   1 entry   2 entry_wait   3 entry_events
  ARGV   1 entry_id
  Reply  1 discarded, 0 there was none
]]
--#include lib/remove

local entry_key, entry_wait_key, entry_events_key = KEYS[1], KEYS[2], KEYS[3]
local entry_id = ARGV[1]

if redis.call("LREM", entry_wait_key, -1, entry_id) == 0 then return 0 end
remove_job_keys(entry_key)
redis.call("XADD", entry_events_key, "*", "event", "removed", "jobId", entry_id, "prev", "wait")
return 1

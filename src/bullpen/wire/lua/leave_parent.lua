--[[ leave_parent: a job that its parent waits for is nobody's child any more; the parent is released when it was the last.

  KEYS   1 job
  ARGV   1 clock_offset
  Reply  1 done, 0 no parent waits for it, -1 no such job
]]
--#include lib/clock
--#include lib/parents

local job_key = KEYS[1]
local clock_offset = ARGV[1]

local fields = redis.call("HMGET", job_key, "name", "parentKey")
if not fields[1] then return -1 end
if not fields[2] or redis.pcall("SREM", fields[2] .. ":dependencies", job_key) ~= 1 then return 0 end
redis.call("HDEL", job_key, "parentKey", "parent")
release_if_none_pending(fields[2], (server_now(clock_offset)))
return 1

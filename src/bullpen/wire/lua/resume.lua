--[[ resume: let workers take again, and wake one if there is something to take.

  Clients before version 6 moved the jobs of a paused queue to a list `paused`: what lies there is merged back, at most 2000 per
  call, and the queue stays paused until all are; the caller repeats the call while some are left. From the newest to the
  oldest, each before the last, so that the order holds over the seams.

  KEYS   1 meta   2 wait   3 paused   4 prioritized   5 events
  ARGV   1 base
  Reply  number of jobs still in the legacy list; 0: the queue is resumed
]]
--#include lib/due_marker
--#include lib/wake

local meta_key, wait_key, paused_key, prioritized_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local base = ARGV[1]

if redis.call("EXISTS", paused_key) == 1 then
  redis.call("HSETNX", meta_key, "bppause", "noticed") -- see lib/layout
  if redis.call("EXISTS", wait_key) == 0 then redis.call("RENAME", paused_key, wait_key) end
end
local legacy = redis.call("LRANGE", paused_key, 0, 1999)
if #legacy > 0 then
  redis.call("LTRIM", paused_key, #legacy, -1)
  redis.call("RPUSH", wait_key, unpack(legacy))
end
local left = redis.call("LLEN", paused_key)
if left > 0 then return left end

redis.call("HDEL", meta_key, "paused")
if redis.call("EXISTS", wait_key, prioritized_key) > 0 then
  wake(base)
else
  wake_when_due(base)
end
redis.call("XADD", events_key, "*", "event", "resumed")
return 0

--[[ pause: let workers take nothing more. Running jobs finish; adds are still accepted.

  Where a client before version 6 was noticed, what waits moves to the list that its resume takes (lib/layout).

  KEYS   1 meta   2 marker   3 events
  ARGV   1 base
  Reply  1 paused now, 0 it was paused already
]]
--#include lib/layout

local meta_key, marker_key, events_key = KEYS[1], KEYS[2], KEYS[3]

local was_paused = redis.call("HEXISTS", meta_key, "paused")
redis.call("HSET", meta_key, "paused", 1)
redis.call("DEL", marker_key)
ready_line(ARGV[1])
redis.call("XADD", events_key, "*", "event", "paused")
return 1 - was_paused

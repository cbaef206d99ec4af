--[[ promote_all: let delayed jobs run now, in the order in which they were due, each in its class of priority.

  At most so many per call; the caller goes on until fewer come back.

  KEYS   1 delayed
  ARGV   1 base   2 most
  Reply  { ids taken out of `delayed`, how many of them are jobs, { id, why ("gone", "name", "type"), ... of the first that
           are none } }
]]
--#include lib/trim
--#include lib/wake
--#include lib/promote

local delayed_key = KEYS[1]
local base, most = ARGV[1], tonumber(ARGV[2])
local FOR_EVER_MS = math.huge

if redis.call("EXISTS", delayed_key) == 0 then return { 0, 0, {} } end
trim_events(base)
local dropped = {}
local taken, promoted = promote_due(base, FOR_EVER_MS, dropped, most)
wake(base)
return { taken, promoted, dropped }

--[[ retry_all: put finished jobs back in line, oldest first, each in its class of priority; a parent waits for the
  children that it needs, whichever of them comes first.

  Only what finished until a given instant: a job that fails again meanwhile is not retried for ever. Work per call is bounded:
  where dead letters must be searched in a long list, fewer jobs fit. The caller goes on while there is more.

  KEYS   1 finished (the set named by state)
  ARGV   1 base   2 clock_offset   3 state   4 until_ms ("" = now)   5 most   6 resets_attempts ("1" or "")   7 dead_letter_base
  Reply  { until_ms, number of jobs retried, more (0 or 1) }
]]
--#include lib/clock
--#include lib/trim
--#include lib/wake
--#include lib/places
--#include lib/reprocess

local finished_key = KEYS[1]
local base, state, most, resets_attempts, dead_letter_base = ARGV[1], ARGV[3], tonumber(ARGV[5]), ARGV[6] == "1", ARGV[7]
local until_ms = tonumber(ARGV[4]) or server_now(ARGV[2])
local MOST_PER_CALL = 500

local wanted = math.min(most, MOST_PER_CALL)
local ids = redis.call("ZRANGEBYSCORE", finished_key, "-inf", until_ms, "LIMIT", 0, wanted)
if #ids == 0 then return { until_ms, 0, 0 } end
require_places(base)
trim_events(base)
local spent, retried, places = 0, 0, {}
for index, job_id in ipairs(ids) do
  if spent >= MOST_PER_CALL then break end
  local cost, place = forget_outcome(base, job_id, resets_attempts, dead_letter_base)
  places[index] = place or false
  spent = spent + (cost or 1)
end
for index, place in ipairs(places) do
  redis.call("ZREM", finished_key, ids[index])
  if place then
    place_again(base, ids[index], place[1], place[2], state)
    retried = retried + 1
  end
end
wake(base)
return { until_ms, retried, (#places < #ids or #ids == wanted) and 1 or 0 }

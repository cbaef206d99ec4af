--[[ sweep: find failed jobs without a dead letter, also those that workers of other clients failed: one step.

  The first step begins a sweep, unless another worker began one less than interval_ms ago; where nobody ever swept, history begins now,
  so that the failures of years are not offered all at once. Each further step goes on where the last one ended.

  KEYS   1 failed   2 meta
  ARGV   1 base   2 clock_offset   3 interval_ms   4 from_ms ("" = begin)   5 skip (jobs of that instant that were looked at)
         6 with_cancelled ("1", or "": those that somebody cancelled need none)
  Reply  { began_ms, from_ms, skip, more (0 or 1), { ids without a dead letter } }, or {} when it is not time yet
]]
--#include lib/clock
--#include lib/letter
--#include lib/cancelled

local failed_key, meta_key = KEYS[1], KEYS[2]
local base, interval_ms, from_ms, skip = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local with_cancelled = ARGV[6] == "1"
local now_ms = server_now(ARGV[2])
local LOOKED_AT_PER_CALL = 500

if not from_ms then
  local began_ms = tonumber(redis.call("HGET", meta_key, "bpsweep")) or 0
  if began_ms <= now_ms and now_ms - began_ms < interval_ms then return {} end
  redis.call("HSET", meta_key, "bpsweep", string.format("%.0f", now_ms))
  if not swept_until(base, now_ms) then redis.call("HSET", meta_key, "bpswept", string.format("%.0f", now_ms)) end
  from_ms = swept_until(base, now_ms)
end
local found = redis.call("ZRANGEBYSCORE", failed_key, from_ms, "+inf", "WITHSCORES", "LIMIT", skip, LOOKED_AT_PER_CALL)
local ids = {}
for index = 1, #found, 2 do
  local score = tonumber(found[index + 1])
  if score ~= from_ms then from_ms, skip = score, 0 end
  skip = skip + 1
  local fields = redis.pcall("HMGET", base .. found[index], "name", "bpdl", "ats", "bpcancel", "failedReason")
  local is_wanted = with_cancelled or not was_cancelled(fields[4], fields[5])
  if not fields.err and fields[1] and is_wanted and not has_letter(fields[2], fields[3]) then ids[#ids + 1] = found[index] end
end
return { now_ms, string.format("%.0f", from_ms), skip, #found == 2 * LOOKED_AT_PER_CALL and 1 or 0, ids }

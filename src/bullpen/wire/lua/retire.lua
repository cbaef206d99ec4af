--[[ retire: delete finished jobs that nobody gave a rule for, beyond the default rule: one step.

  Only jobs that were added by us and whose options do not name `option`: what other clients add stays as long as they say. The newest
  `count` stay, and so does whatever finished within the last minute: somebody may still ask for the result. Older than age_ms goes.
  A step looks at some hundred jobs, behind the last one that the step before looked at and left.

  KEYS   1 set (completed or failed)
  ARGV   1 base   2 clock_offset   3 option   4 count (-1 = no bound)   5 age_ms   6 needs_letters ("1": only with a dead letter, or "")
         7 after_id ("" = begin)   8 after_score
  Reply  { removed, more (0 or 1), id and score of the last job that was looked at and left }
]]
--#include lib/clock
--#include lib/retention

local set_key, base, option, count, age_ms = KEYS[1], ARGV[1], '"' .. ARGV[3] .. '"', tonumber(ARGV[4]), tonumber(ARGV[5])
local needs_letters, after_id, after_score = ARGV[6] == "1", ARGV[7], ARGV[8]
local now_ms = server_now(ARGV[2])
local LOOKED_AT_PER_CALL = 250
local YOUNG_MS = 60000

local start = 0
if after_id ~= "" then
  local rank = redis.call("ZRANK", set_key, after_id)
  start = rank and rank + 1 or redis.call("ZCOUNT", set_key, "-inf", "(" .. after_score)
end
local excess = count >= 0 and redis.call("ZCARD", set_key) - count or 0
local found = redis.call("ZRANGE", set_key, start, start + LOOKED_AT_PER_CALL - 1, "WITHSCORES")
local doomed, more = {}, #found == 2 * LOOKED_AT_PER_CALL and 1 or 0
for index = 1, #found, 2 do
  local job_id, score = found[index], tonumber(found[index + 1])
  local is_beyond = start + (index - 1) / 2 < excess and score <= now_ms - YOUNG_MS
  if not is_beyond and score > now_ms - age_ms then -- all behind it finished later
    more = 0
    break
  end
  local fields = redis.pcall("HMGET", base .. job_id, "bp", "opts", "bpdl", "ats", "bpcancel", "failedReason")
  if not fields.err and fields[1] and not string.find(fields[2] or "", option, 1, true)
    and (not needs_letters or was_cancelled(fields[5], fields[6]) or has_letter(fields[3], fields[4])) then
    doomed[#doomed + 1] = job_id
  else
    after_id, after_score = job_id, found[index + 1]
  end
end
drop_finished(base, set_key, doomed, now_ms)
return { #doomed, more, after_id, after_score }

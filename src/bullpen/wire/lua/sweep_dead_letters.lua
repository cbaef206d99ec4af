--[[ sweep_dead_letters: end the dead letters of jobs that are failed no longer, because another client retried or completed them: one step.

  A letter whose job is gone stays: it may be all that is left of it. Each step looks at the next entries of the line and remembers where
  it ended; the one that reaches the end begins anew.

  KEYS   1 meta   2 failed   3 entry_wait
  ARGV   1 base   2 dead_letter_base   3 most
  Reply  { letters ended, more (0 or 1) }
]]
--#include lib/take_letter

local meta_key, failed_key, entry_wait_key = KEYS[1], KEYS[2], KEYS[3]
local base, dead_letter_base, most = ARGV[1], ARGV[2], tonumber(ARGV[3])

local start = tonumber(string.match(redis.call("HGET", meta_key, "bpletters") or "", "^%d+$") or 0)
if start > 9007199254740991 then start = 0 end
local found = redis.pcall("LRANGE", entry_wait_key, start, start + most - 1)
if found.err then return { 0, 0 } end -- something else stands there: no letters can be read
local ended = 0
for _, entry_id in ipairs(found) do
  local written = string.match(entry_id, "^dl%-(.+)%-%d+$")
  for _, job_id in ipairs(written and { written, (string.gsub(written, "%%3A", ":")) } or {}) do
    -- The job itself names its letter, so no entry of somebody else is touched.
    if redis.pcall("HGET", base .. job_id, "bpdl") == entry_id and not redis.call("ZSCORE", failed_key, job_id) then
      take_letter_away(base, dead_letter_base, entry_id)
      redis.call("HDEL", base .. job_id, "bpdl")
      ended = ended + 1
      break
    end
  end
end
local more = #found == most
if more then
  redis.call("HSET", meta_key, "bpletters", start + most - ended)
elseif start > 0 then
  redis.call("HDEL", meta_key, "bpletters")
end
return { ended, more and 1 or 0 }

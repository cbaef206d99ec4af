--[[ find_jobs: which of these jobs fit a filter.

  Why a script: a state may hold a million jobs, and a filter fits a few. Moving all of them to ask them costs a thousand times more.

  KEYS   1 meta (names the queue's place; not read)
  ARGV   1 base   2 name (empty: any)   3 text (in small letters; empty: any)   4 most_bytes (of data and error that are searched)
         5 attempts (made, at least)   6 since_ms   7 until_ms (added then; empty: any)   then job ids
  Reply  the ids that fit, in their order
]]
local _meta_key = KEYS[1] -- luacheck: ignore 211
local base, name, text, most_bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local attempts, since_ms, until_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local FIRST_ID = 8

local function holds(value)
  return value and string.find(string.lower(string.sub(value, 1, most_bytes)), text, 1, true)
end

local found = {}
for arg = FIRST_ID, #ARGV do
  local job_id = ARGV[arg]
  local key = base .. job_id
  local job = redis.pcall("HMGET", key, "name", "timestamp", "atm", "attemptsMade", "failedReason")
  local fits = not job.err and job[1] and (name == "" or job[1] == name)
  if fits and attempts then fits = (tonumber(job[3] or job[4]) or 0) >= attempts end
  if fits and since_ms then fits = (tonumber(job[2]) or 0) >= since_ms end
  if fits and until_ms then fits = (tonumber(job[2]) or 0) < until_ms end
  if fits and text ~= "" then fits = holds(job_id) or holds(job[5]) or holds(redis.call("HGET", key, "data")) end
  if fits then found[#found + 1] = job_id end
end
return found

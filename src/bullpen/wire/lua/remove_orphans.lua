--[[ remove_orphans: delete what is left of jobs that no state lists, after looking again at each.

  The caller found the candidates step by step, while jobs moved; only this look, in one instant, decides. Where the lines are short
  they are looked through here. Where they are long that would hold up everybody, so it takes two calls: the first marks a candidate
  that is in no set (`bporphan`: the search and what every client changes when it moves a job); then the caller reads the lines; the
  second deletes those that it did not meet and that still have the mark as it was written. Why that is safe: queue/orphans.py.
  A parent that waits for such a job is told that it is gone.
  A job that has not finished is no leftover: it lost its place, and can be put back in line. Only "all" deletes it; "restore" puts
  such jobs back and deletes nothing.

  KEYS   1 meta   2 wait   3 paused   4 active
  ARGV   1 base   2 clock_offset   3 search (its id)   4 not_met ("1": the caller read the lines since the first call)
         5 mode ("delete", "all" or "restore")
         then per candidate: kind ("job", "part" of a job, "owner" or "next" of a deduplication id)   rest (what follows the base in
         its key)
  Reply  { number of candidates deleted, or put back, ids in wait, ids in paused, { candidates that are marked now } }
]]
--#include lib/clock
--#include lib/removal
--#include lib/sets

local meta_key, wait_key, paused_key, active_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local base, search, not_met, mode = ARGV[1], ARGV[3], ARGV[4] == "1", ARGV[5]
local now_ms = server_now(ARGV[2])

local TYPE_OF = { job = "hash", owner = "string" }
local LINES = { active_key, wait_key, paused_key }
local SHORT, END = 10000, 1000
local waiting, paused = redis.call("LLEN", wait_key), redis.call("LLEN", paused_key)
local are_short = waiting + paused + redis.call("LLEN", active_key) <= SHORT

-- Where the lines are long: whether it stands at one of their ends.
local listed
local function is_listed(job_id)
  if listed then return listed[job_id] end
  listed = {}
  for _, key in ipairs(LINES) do
    for _, first in ipairs(are_short and { 0 } or { 0, -END }) do
      for _, id in ipairs(redis.call("LRANGE", key, first, are_short and -1 or first + END - 1)) do listed[id] = true end
    end
  end
  return listed[job_id]
end

local function mark_of(key)
  local fields = redis.call("HMGET", key, "timestamp", "processedOn", "finishedOn", "ats", "atm", "attemptsMade", "stc", "priority",
    "delay", "pb")
  for index = 1, 10 do fields[index] = fields[index] or "" end
  fields[11] = redis.call("HSTRLEN", key, "stacktrace")
  return search .. " " .. table.concat(fields, " ")
end

local marked = {}
local function is_orphaned_job(job_id)
  local key = base .. job_id
  -- The record of a scheduler: listed by name, or (of newer clients) with `ic`.
  local scheduler_id = string.match(job_id, "^repeat:(.*)$")
  if scheduler_id and redis.call("ZSCORE", base .. "repeat", scheduler_id) then return false end
  if redis.call("HEXISTS", key, "ic") == 1 or set_of(base, job_id) or redis.call("EXISTS", key .. ":lock") == 1 then return false end
  if is_listed(job_id) then return false end
  if are_short then return true end
  local mark = redis.call("HGET", key, "bporphan") or ""
  if not_met then return mark == mark_of(key) end
  -- Not again: a call that was repeated and comes late must not make an old mark look fresh.
  if string.sub(mark, 1, #search) ~= search then redis.call("HSET", key, "bporphan", mark_of(key)) end
  marked[#marked + 1] = job_id
  return false
end

local function is_orphan(kind, rest)
  if TYPE_OF[kind] and redis.call("TYPE", base .. rest).ok ~= TYPE_OF[kind] then return false end
  if kind == "job" then
    return is_orphaned_job(rest)
  elseif kind == "part" then
    return redis.call("EXISTS", base .. string.match(rest, "^(.*):[^:]+$")) == 0
  elseif kind == "owner" then -- with a TTL the key outlives its job on purpose
    local owner = redis.call("GET", base .. rest)
    return owner and redis.call("PTTL", base .. rest) == -1 and redis.call("EXISTS", base .. owner) == 0
  end
  return redis.call("EXISTS", base .. "de:" .. string.match(rest, "^dn:(.*)$")) == 0
end

local function put_back(job_id, fields)
  local key = base .. job_id
  local delay_ms = whole_ms(fields[5])
  local due_ms = whole_ms(fields[4]) + delay_ms
  redis.call("HDEL", key, "bporphan")
  if redis.call("EXISTS", key .. ":dependencies") == 1 then
    redis.call("ZADD", base .. "waiting-children", now_ms, job_id)
    redis.pcall("XADD", base .. "events", "*", "event", "waiting-children", "jobId", job_id)
  elseif delay_ms > 0 and due_ms > now_ms then
    place_delayed(base, job_id, due_ms)
    wake_when_due(base)
  else
    place_ready(base, job_id, priority_class(fields[6]), false)
    wake(base)
    redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", job_id)
  end
end

local deleted = 0
for arg = 6, #ARGV, 2 do
  local kind, rest = ARGV[arg], ARGV[arg + 1]
  local key = base .. rest
  if key ~= meta_key and redis.call("EXISTS", key) == 1 and is_orphan(kind, rest) then
    local fields = kind == "job" and redis.call("HMGET", key, "parentKey", "deid", "name", "timestamp", "delay", "priority",
      "finishedOn")
    local is_restorable = fields and fields[3] and fields[4] and not fields[7]
    if is_restorable and mode == "restore" then
      put_back(rest, fields)
      deleted = deleted + 1
    elseif mode == "all" or (mode == "delete" and not is_restorable) then
      if fields then
        delete_job(base, rest, fields[2])
        if fields[1] then on_child_removed(fields[1], key, now_ms) end
      else
        redis.call("UNLINK", key)
      end
      deleted = deleted + 1
    end
  end
end
return { deleted, waiting, paused, marked }

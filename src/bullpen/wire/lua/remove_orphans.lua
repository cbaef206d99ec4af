--[[ remove_orphans: delete what is left of jobs that no state lists, after looking again at each.

  The caller found the candidates step by step, while jobs moved; only this look, in one instant, decides. A parent that waits for
  such a job is told that it is gone.

  KEYS   1 meta
  ARGV   1 base   2 clock_offset   then per candidate: kind ("job", "part" of a job, "owner" or "next" of a deduplication id)   rest
         (what follows the base in its key)
  Reply  number of candidates deleted
]]
--#include lib/clock
--#include lib/wake
--#include lib/delayed
--#include lib/due_marker
--#include lib/ready
--#include lib/remove
--#include lib/parents
--#include lib/removal
--#include lib/state

local meta_key = KEYS[1]
local base = ARGV[1]
local now_ms = server_now(ARGV[2])

local TYPE_OF = { job = "hash", owner = "string" }

local function is_orphan(kind, rest)
  if TYPE_OF[kind] and redis.call("TYPE", base .. rest).ok ~= TYPE_OF[kind] then return false end
  if kind == "job" then
    -- A hash with `ic` is the record of a scheduler.
    return redis.call("HEXISTS", base .. rest, "ic") == 0 and state_of(base, rest) == "unknown"
  elseif kind == "part" then
    return redis.call("EXISTS", base .. string.match(rest, "^(.*):[^:]+$")) == 0
  elseif kind == "owner" then -- with a TTL the key outlives its job on purpose
    local owner = redis.call("GET", base .. rest)
    return owner and redis.call("PTTL", base .. rest) == -1 and redis.call("EXISTS", base .. owner) == 0
  end
  return redis.call("EXISTS", base .. "de:" .. string.match(rest, "^dn:(.*)$")) == 0
end

local deleted = 0
for arg = 3, #ARGV, 2 do
  local kind, rest = ARGV[arg], ARGV[arg + 1]
  local key = base .. rest
  if key ~= meta_key and redis.call("EXISTS", key) == 1 and is_orphan(kind, rest) then
    if kind == "job" then
      local fields = redis.call("HMGET", key, "parentKey", "deid")
      delete_job(base, rest, fields[2])
      if fields[1] then on_child_removed(fields[1], key, now_ms) end
    else
      redis.call("UNLINK", key)
    end
    deleted = deleted + 1
  end
end
return deleted

--#include lib/if_typed

-- ready_line: the list that takes ready ids without a priority. Clients before version 6 keep those of a paused queue in a list
-- `paused`, and their resume puts that list in the place of `wait`: what stands in `wait` then loses its place without a word. So
-- where such a client was noticed their layout is used: the list exists, `meta` names a version below 6, or somebody noticed before
-- and left the mark `bppause` (which may also say that one layout is wanted: "list" or "field"). Elsewhere ids stay in `wait`, where
-- version 6 counts them. Asked once per script and queue.
local line_of = {}

-- gather_paused: all that waits, in the list `paused`: what stood in `wait` is older than what came after the pause. The shorter of
-- the two moves.
local function gather_paused(base)
  local from_key, to_key = base .. "wait", base .. "paused"
  local waiting, paused = if_typed("LLEN", from_key), if_typed("LLEN", to_key)
  if not waiting or not paused or waiting == 0 then return end
  if waiting < paused then
    for _ = 1, waiting do redis.call("LMOVE", from_key, to_key, "LEFT", "RIGHT") end
  else
    for _ = 1, paused do redis.call("LMOVE", to_key, from_key, "RIGHT", "LEFT") end
    redis.call("RENAME", from_key, to_key)
  end
end

local function is_older(version)
  local major = version and string.match(version, "^bullmq[%w-]*:(%d+)%.")
  return major and tonumber(major) < 6
end

local function ready_line(base)
  local line = line_of[base]
  if line then return line end
  line = base .. "wait"
  local stored = redis.pcall("HMGET", base .. "meta", "paused", "bppause", "version")
  if stored[1] and stored[2] ~= "field" then
    if not stored[2] and (is_older(stored[3]) or redis.pcall("EXISTS", base .. "paused") == 1) then
      redis.call("HSET", base .. "meta", "bppause", "noticed")
      stored[2] = "noticed"
    end
    if stored[2] then
      gather_paused(base)
      line = base .. "paused"
    end
  end
  line_of[base] = line
  return line
end

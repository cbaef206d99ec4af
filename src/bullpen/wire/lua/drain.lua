--[[ drain: delete jobs that have not begun: one step over one structure.

  The job that a scheduler made last stays, or the scheduler would stop for ever; such jobs are put back where they were and looked at
  again by the next step, so that whatever workers and producers do meanwhile nothing is passed over. There are no events.

  KEYS   1 state_key
  ARGV   1 base   2 clock_offset   3 is_list ("1" or "")   4 kept (jobs that the last step left in place)   5 most
  Reply  { number of jobs removed, number kept, more (0 or 1) }
]]
--#include lib/clock
--#include lib/removal

local state_key = KEYS[1]
local base, is_list, wanted = ARGV[1], ARGV[3] == "1", tonumber(ARGV[4]) + tonumber(ARGV[5])
local now_ms = server_now(ARGV[2])

local ids
if is_list then
  ids = redis.call("LRANGE", state_key, -wanted, -1)
else
  ids = redis.call("ZRANGE", state_key, 0, wanted - 1)
end
local kept, doomed, hashes = {}, {}, {}
for _, job_id in ipairs(ids) do
  local fields = redis.pcall("HMGET", base .. job_id, "rjk", "parentKey", "deid")
  if not fields.err and is_current_iteration(base, job_id, fields[1]) then
    kept[#kept + 1] = job_id
  else
    doomed[#doomed + 1] = job_id
    hashes[#doomed] = fields
  end
end
if #doomed == 0 then return { 0, #kept, 0 } end

local function in_chunks(command, members) -- Lua passes at most some 8000 arguments
  for first = 1, #members, 5000 do
    redis.call(command, state_key, unpack(members, first, math.min(first + 4999, #members)))
  end
end
if is_list then
  redis.call("LTRIM", state_key, 0, -#ids - 1)
  in_chunks("RPUSH", kept)
else
  in_chunks("ZREM", doomed)
end
for index, job_id in ipairs(doomed) do
  local fields = hashes[index]
  delete_job(base, job_id, fields[3])
  if fields[2] then bury_with_parent(base, fields[2], base .. job_id, now_ms) end
end
return { #doomed, #kept, #ids == wanted and 1 or 0 }

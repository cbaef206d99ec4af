--[[ read_heads: what a list shows of jobs: their small fields whole, of their large ones the beginning and the size.

  Why a script: payloads may have megabytes, and a page of a list shows a line of each. HGETALL would move all of it.

  KEYS   1 meta (names the queue's place; not read)
  ARGV   1 base   2 most_bytes (of a large field)   then job ids
  Reply  per id: { size of the large fields in bytes, one number each; then the flat hash, large fields cut }; an empty list when
         there is no such job
  Large fields, in the order of their sizes: data, returnvalue, stacktrace, failedReason, progress, opts
]]
local _meta_key = KEYS[1] -- luacheck: ignore 211
local base, most_bytes = ARGV[1], tonumber(ARGV[2])
local SMALL = {
  "name", "timestamp", "delay", "priority", "atm", "attemptsMade", "ats", "stc", "processedOn", "finishedOn", "pb", "parentKey", "rjk",
  "deid", "bpdl",
}
local LARGE = { "data", "returnvalue", "stacktrace", "failedReason", "progress", "opts" }
local FIRST_ID = 3

local heads = {}
for arg = FIRST_ID, #ARGV do
  local key, head = base .. ARGV[arg], {}
  local small = redis.pcall("HMGET", key, unpack(SMALL))
  if not small.err and small[1] then
    for index, name in ipairs(LARGE) do
      head[index] = redis.call("HSTRLEN", key, name)
    end
    for index, name in ipairs(SMALL) do
      if small[index] then
        head[#head + 1] = name
        head[#head + 1] = small[index]
      end
    end
    for index, name in ipairs(LARGE) do
      if head[index] > 0 then
        local value = redis.call("HGET", key, name)
        head[#head + 1] = name
        head[#head + 1] = name == "opts" and value or string.sub(value, 1, most_bytes)
      end
    end
  end
  heads[#heads + 1] = head
end
return heads

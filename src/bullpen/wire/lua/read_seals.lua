--[[ read_seals: the beginnings of sealed payloads, without the payloads: they may be megabytes, and most are not sealed.

  KEYS   any number of jobs
  ARGV   1 mark (how sealed data begins)   2 wrapped (how an entry begins whose payload is sealed)   3 most (bytes of each)
  Reply  for each key the beginning of its data, or "" when that is not sealed
]]
--#include lib/if_typed

local mark, wrapped, most = ARGV[1], ARGV[2], tonumber(ARGV[3])

local function is_sealed(data)
  return string.sub(data, 1, #mark) == mark or string.sub(data, 1, #wrapped) == wrapped
end

local found = {}
for place, job_key in ipairs(KEYS) do
  local data = if_typed("HGET", job_key, "data")
  found[place] = data and is_sealed(data) and string.sub(data, 1, most) or ""
end
return found

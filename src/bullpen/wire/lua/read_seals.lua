--[[ read_seals: the beginnings of sealed payloads, without the payloads: they may be megabytes, and most are not sealed.

  KEYS   any number of jobs
  ARGV   1 mark (how sealed data begins)   2 wrapped (how an entry begins whose payload is sealed)   3 most (bytes of each)
         4 results ("1": return values too)
  Reply  the beginnings, of sealed ones only; a job may have two
]]
--#include lib/if_typed

local mark, wrapped, most, fields = ARGV[1], ARGV[2], tonumber(ARGV[3]), { "data" }
if ARGV[4] == "1" then fields[2] = "returnvalue" end

local function is_sealed(stored)
  return string.sub(stored, 1, #mark) == mark or string.sub(stored, 1, #wrapped) == wrapped
end

local found = {}
for _, job_key in ipairs(KEYS) do
  for _, field in ipairs(fields) do
    local stored = if_typed("HGET", job_key, field)
    if stored and is_sealed(stored) then found[#found + 1] = string.sub(stored, 1, most) end
  end
end
return found

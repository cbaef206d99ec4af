--[[ read_result_seals: the beginnings of the sealed return values that the children of a job have left for it; one step.

  KEYS   1 processed (return values of completed children)
  ARGV   1 cursor   2 count (about so many in this step)   3 mark (how sealed values begin)   4 most (bytes of each)
  Reply  the next cursor, "0" after the last step; then the beginnings, of sealed ones only
]]
--#include lib/if_typed

local processed_key, mark, most = KEYS[1], ARGV[3], tonumber(ARGV[4])
local step = if_typed("HSCAN", processed_key, ARGV[1], "COUNT", ARGV[2])
if not step then return { "0" } end

local found = { step[1] }
for place = 2, #step[2], 2 do
  local stored = step[2][place]
  if string.sub(stored, 1, #mark) == mark then found[#found + 1] = string.sub(stored, 1, most) end
end
return found

-- with_note: a list of redrives with one more entry (JSON members without the instant), the oldest out. It is only parsed when it must
-- be cut.
local function with_note(list, note, now_ms)
  local MOST_NOTES = 20
  local text = '{"at":' .. string.format("%.0f", now_ms) .. "," .. note .. "}"
  if not list or not string.find(list, "^%[{.*}%]$") then return "[" .. text .. "]" end
  list = string.sub(list, 1, -2) .. "," .. text .. "]"
  local readable, notes = pcall(cjson.decode, list)
  if not readable then return "[" .. text .. "]" end
  if #notes <= MOST_NOTES then return list end
  while #notes > MOST_NOTES do table.remove(notes, 1) end
  return cjson.encode(notes)
end

--#include lib/store_letter

-- append_stack: the job's stored stack list with one JSON text more, of which the last `limit` ("" = all) stay. The list is only
-- parsed when it must be cut; a foreign list that cannot be parsed is started anew.
local function append_stack(stored, stack, limit)
  if stack == "" then return stored or "[]" end
  if limit == "0" then return "[]" end
  local alone = "[" .. stack .. "]"
  if not stored or stored == "" or stored == "[]" or stored == "null" then return alone end
  local list = string.sub(stored, 1, -2) .. "," .. stack .. "]"
  local readable, entries = pcall(cjson.decode, list)
  if not readable or type(entries) ~= "table" then return alone end
  if limit == "" or #entries <= tonumber(limit) then return list end
  local kept = {}
  for index = #entries - tonumber(limit) + 1, #entries do kept[#kept + 1] = entries[index] end
  return cjson.encode(kept)
end

-- write_dead_letter: put the entry of a finally failed job into the dead-letter queue. The client sends the JSON around the payload;
-- the stored data bytes stand in between unchanged.
-- Its own members come last, so that they count: the payload may be another one since the client looked at it.
-- The id is derived from job and attempt, so that the same failure cannot be written twice. Returns false, with nothing left behind,
-- when keys of that queue have another type: the failure itself must be written all the same.
local function write_dead_letter(dead_letter_base, at, job_key, now_ms)
  local entry_id = ARGV[at + 5]
  if redis.call("EXISTS", dead_letter_base .. entry_id) == 0 then
    local stored = redis.call("HMGET", job_key, "data", "bpredriven")
    local data, history = stored[1], ""
    if not data or data == "" then data = "{}" end -- as every reader takes it
    if ARGV[at + 10] == "text" then
      data = cjson.encode(data) -- foreign data that is not JSON
    elseif ARGV[at + 10] == "sent" then
      data = "" -- foreign data that is not even text: it stands in the head already
    end
    -- Whoever may write the job may write anything there: what is not a JSON value would end the field and begin others.
    if stored[2] and pcall(cjson.decode, stored[2]) then history = ',"redriven":' .. stored[2] end
    local entry = ARGV[at + 7] .. data .. history .. ARGV[at + 8]
    if not store_letter(dead_letter_base, entry_id, ARGV[at + 6], entry, ARGV[at + 9], ARGV[at + 11], now_ms) then return false end
  end
  redis.call("HSET", job_key, "bpdl", entry_id)
  return true
end

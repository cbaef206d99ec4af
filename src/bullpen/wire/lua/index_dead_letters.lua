--[[ index_dead_letters: let the index of dead letters know entries that others wrote, and forget those that others removed.

  Why a script: meanwhile an entry may have gone, or come; counters change only with the entry they count. And the two numbers are of
  one moment.

  KEYS   1 facts
  ARGV   1 dead_letter_base
         then per entry: entry_id   entry_facts ("" = forget it if it is gone)
  Reply  { entries in line, entries that the index knows }
]]
--#include lib/letter_index

local facts_key, letter_base = KEYS[1], ARGV[1]
for at = 2, #ARGV, 2 do
  local entry_id, facts = ARGV[at], ARGV[at + 1]
  if redis.call("EXISTS", letter_base .. entry_id) == 0 then
    if redis.call("HEXISTS", facts_key, entry_id) == 1 then unindex_letter(letter_base, entry_id) end
  elseif facts ~= "" then
    index_letter(letter_base, entry_id, facts)
  end
end
local depth, known = redis.pcall("LLEN", letter_base .. "wait"), redis.pcall("HLEN", facts_key)
known = type(known) == "number" and known or 0
local of = letter_base .. "bp:letters:"
local in_order = redis.pcall("ZLEXCOUNT", of .. "index", "[a:", "(a;")
local others = redis.call("EXISTS", of .. "counts", of .. "causes")
if in_order ~= known or others ~= (known > 0 and 2 or 0) then -- a part was evicted: all is made anew
  redis.call("UNLINK", facts_key, of .. "index", of .. "counts", of .. "causes", of .. "tenants")
  known = 0
end
return { type(depth) == "number" and depth or 0, known }

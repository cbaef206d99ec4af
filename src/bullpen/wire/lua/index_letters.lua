--[[ index_letters: let the index of dead letters know entries that others wrote, and forget those that others removed.

  Why a script: meanwhile an entry may have gone, or come; counters change only with the entry they count.

  KEYS   1 facts
  ARGV   1 dead_letter_base
         then per entry: entry_id   entry_facts ("" = forget it if it is gone)
  Reply  number of entries that were gone
]]
--#include lib/letter_index

local facts_key, letter_base, gone = KEYS[1], ARGV[1], 0
for at = 2, #ARGV, 2 do
  local entry_id, facts = ARGV[at], ARGV[at + 1]
  if redis.call("EXISTS", letter_base .. entry_id) == 0 then
    if redis.call("HEXISTS", facts_key, entry_id) == 1 then unindex_letter(letter_base, entry_id) end
    gone = gone + 1
  elseif facts ~= "" then
    index_letter(letter_base, entry_id, facts)
  end
end
return gone

--[[ put_dead_letter: write the dead letter of work that failed elsewhere. Writing it again changes nothing.

  Why a script: the entry, its place in the line and what is kept beside it are one.

  KEYS   1 entry
  ARGV   1 dead_letter_base   2 clock_offset   3 entry_id   4 entry_name   5 data   6 entry_opts   7 entry_facts
  Reply  1 written, 0 it is there already, -1 it cannot be written
]]
--#include lib/clock
--#include lib/store_letter

local entry_key = KEYS[1]
if redis.call("EXISTS", entry_key) == 1 then return 0 end
return store_letter(ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], server_now(ARGV[2])) and 1 or -1

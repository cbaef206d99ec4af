--[[ end_sweep: note that every failure until an instant has its dead letter, so that retention may take the failed jobs.

  KEYS   1 meta
  ARGV   1 until_ms
  Reply  1 noted, 0 a later sweep was faster
]]
local meta_key = KEYS[1]
local until_ms = ARGV[1]

if (tonumber(redis.call("HGET", meta_key, "bpswept")) or 0) > tonumber(until_ms) then return 0 end
redis.call("HSET", meta_key, "bpswept", until_ms)
return 1

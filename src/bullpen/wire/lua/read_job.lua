--[[ read_job: a job's hash and its state, of one instant.

  KEYS   1 job
  ARGV   1 base   2 job_id
  Reply  { state, flat hash } (an empty hash means that there is no such job; an empty state: in a long line, or in none; seek tells)
]]
--#include lib/state
--#include lib/record

local job_key = KEYS[1]
local base, job_id = ARGV[1], ARGV[2]

local hash = redis.pcall("HGETALL", job_key)
if hash.err then
  if string.sub(hash.err, 1, 9) ~= "WRONGTYPE" then return hash end
  hash = {} -- no client writes a job as anything but a hash, so this is none
end
if #hash == 0 or is_record(base, job_id) then return { "unknown", {} } end
return { state_of(base, job_id) or "", hash }

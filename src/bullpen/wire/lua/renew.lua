--[[ renew: prolong the locks of running jobs.

  Why a script: between reading a lock and prolonging it another worker may have taken the job.
  The first write is PEXPIRE, which Redis allows when memory is full: a full server must not cost a running job its lock.

  KEYS   1 stalled
  ARGV   1 base   2 lock_ms   then per job: job_id   token
  Reply  ids whose lock is no longer ours
]]
local stalled_key = KEYS[1]
local base, lock_ms = ARGV[1], ARGV[2]

local lost, kept = {}, {}
for arg = 3, #ARGV, 2 do
  local job_id, token = ARGV[arg], ARGV[arg + 1]
  local lock_key = base .. job_id .. ":lock"
  if redis.call("GET", lock_key) == token then
    redis.call("PEXPIRE", lock_key, lock_ms)
    kept[#kept + 1] = job_id
  else
    lost[#lost + 1] = job_id
  end
end
if #kept > 0 then redis.pcall("SREM", stalled_key, unpack(kept)) end
return lost

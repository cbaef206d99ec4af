--[[ renew: prolong the locks of running jobs, and take those again that ran out while nobody could renew them.

  Why a script: between reading a lock and prolonging it another worker may have taken the job.
  A lock that ran out (the server was away for longer, its clock jumped) is taken again while nothing has happened to the job: it
  is still active, and no take has come after this run's, or `ats` would have grown. Else the run is lost.
  The first write is PEXPIRE, which Redis allows when memory is full (then also the rest): a full server must not cost a running
  job its lock.

  KEYS   1 stalled
  ARGV   1 base   2 lock_ms   then per job: job_id   token   attempts_started
  Reply  { ids whose lock is no longer ours, ids whose lock was taken again, those of the first that have no job any more,
         { id, reason, ... of those that somebody wants cancelled } }
]]
local stalled_key = KEYS[1]
local base, lock_ms = ARGV[1], ARGV[2]

local lost, kept, retaken, gone, unwanted = {}, {}, {}, {}, {}
for arg = 3, #ARGV, 3 do
  local job_id, token = ARGV[arg], ARGV[arg + 1]
  local lock_key = base .. job_id .. ":lock"
  local holder = redis.call("GET", lock_key)
  if holder == token then
    redis.call("PEXPIRE", lock_key, lock_ms)
    kept[#kept + 1] = job_id
  elseif not holder and redis.pcall("HGET", base .. job_id, "ats") == ARGV[arg + 2]
    and redis.call("LPOS", base .. "active", job_id) then
    redis.call("PEXPIRE", lock_key, lock_ms)
    redis.call("SET", lock_key, token, "PX", lock_ms)
    kept[#kept + 1] = job_id
    retaken[#retaken + 1] = job_id
  else
    lost[#lost + 1] = job_id
    if redis.call("EXISTS", base .. job_id) == 0 then gone[#gone + 1] = job_id end
  end
end
if #kept > 0 then redis.pcall("SREM", stalled_key, unpack(kept)) end
for _, job_id in ipairs(kept) do
  -- Without a deferred failure the field is what a client that does not know it left of an earlier run.
  local fields = redis.pcall("HMGET", base .. job_id, "bpcancel", "defa")
  if fields[1] and fields[2] then
    unwanted[#unwanted + 1] = job_id
    unwanted[#unwanted + 1] = fields[1]
  end
end
return { lost, retaken, gone, unwanted }

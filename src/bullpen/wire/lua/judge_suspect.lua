--[[ judge_suspect: a job that stalled repeatedly was taken; has it killed its worker while it ran alone?

  Only a death while alone proves that the job itself kills its worker; jobs that merely ran beside it must not suffer. A run alone
  leaves its take and the counts of that moment (`begin_solo`). If every take since then ended in a stall, that run did too: a death,
  counted once, here, so that whatever becomes of this take does not acquit. If an attempt has ended since then, the job can
  run without killing anybody, and earlier deaths count no longer. A run that was given back says nothing.
  The verdict is kept like a run alone: a worker that dies before it stores the failure acquits nobody, and a job that somebody
  puts back after it failed begins anew.

  KEYS   1 job   2 lock
  ARGV   1 token   2 attempts_started   3 stalled_count   4 attempts_made   5 limit (deaths that condemn; 0: none do)
  Reply  { "suspect" (run it alone), "condemned" (it does not run), or "lost" (the lock is no longer ours); deaths while alone }
]]
local job_key, lock_key = KEYS[1], KEYS[2]
local token, attempts_started, stalled_count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local attempts_made, limit = tonumber(ARGV[4]), tonumber(ARGV[5])

if redis.call("GET", lock_key) ~= token then return { "lost", 0 } end
local earlier = redis.call("HMGET", job_key, "bpsolo", "bpstc", "bpatm", "bpdeaths")
local alone_at, deaths = tonumber(earlier[1]), tonumber(earlier[4]) or 0
local is_new = not alone_at or alone_at < attempts_started -- else this call is repeated, and has counted already
if alone_at and is_new then
  if stalled_count - (tonumber(earlier[2]) or 0) >= attempts_started - alone_at then
    deaths = deaths + 1
  elseif tonumber(earlier[3]) ~= attempts_made then
    deaths = 0
  end
  redis.call("HDEL", job_key, "bpsolo", "bpstc", "bpatm")
  redis.call("HSET", job_key, "bpdeaths", deaths)
end
if limit == 0 or deaths < limit then return { "suspect", deaths } end
redis.call("HSET", job_key, "bpsolo", attempts_started, "bpstc", stalled_count, "bpatm", attempts_made)
return { "condemned", deaths }

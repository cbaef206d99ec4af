--[[ add_log: append one line to a job's log and keep the last ones.

  KEYS   1 job   2 logs
  ARGV   1 line   2 keep
  Reply  number of lines kept, or -1 when the job does not exist
]]
local job_key, logs_key = KEYS[1], KEYS[2]
local line, keep = ARGV[1], tonumber(ARGV[2])

if redis.call("EXISTS", job_key) == 0 then return -1 end
if keep < 1 then
  redis.call("DEL", logs_key) -- LTRIM to the last 0 would keep them all
  return 0
end
local length = redis.call("RPUSH", logs_key, line)
if length > keep then
  redis.call("LTRIM", logs_key, -keep, -1)
  return keep
end
return length

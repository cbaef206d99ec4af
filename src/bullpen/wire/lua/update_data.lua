--[[ update_data: replace the payload of an existing job. A script, because writing to a removed job would leave a stub behind.

  KEYS   1 job
  ARGV   1 data (JSON)
  Reply  0, or -1 when the job does not exist
]]
local job_key = KEYS[1]
local data = ARGV[1]

if redis.call("EXISTS", job_key) == 0 then return -1 end
redis.call("HSET", job_key, "data", data)
return 0

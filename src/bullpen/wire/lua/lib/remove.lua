-- remove_job_keys: delete everything that is stored under one job, its lock excepted.
local function remove_job_keys(job_key)
  redis.call("DEL", job_key, job_key .. ":logs", job_key .. ":dependencies", job_key .. ":processed",
    job_key .. ":failed", job_key .. ":unsuccessful")
end

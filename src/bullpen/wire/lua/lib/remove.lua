-- remove_job_keys: delete everything that is stored under one job, its lock excepted.
local function remove_job_keys(key)
  redis.call("DEL", key, key .. ":logs", key .. ":dependencies", key .. ":processed", key .. ":failed",
    key .. ":unsuccessful")
end

--#include lib/layout

-- Where a ready job goes, asked before it leaves the place it has: Redis does not roll back, and it would be in no list.

-- missing_place: nil, or why a ready job cannot be placed, with the name of the key.
local function missing_place(base)
  for key, command in pairs({ [ready_line(base)] = "LLEN", [base .. "prioritized"] = "ZCARD" }) do
    local length = redis.pcall(command, key)
    if type(length) == "table" then return length.err .. ": " .. key end
  end
  return nil
end

-- missing_later: the same of a job that may have to wait for its time.
local function missing_later(base)
  local length = redis.pcall("ZCARD", base .. "delayed")
  if type(length) == "table" then return length.err .. ": " .. base .. "delayed" end
  return missing_place(base)
end

-- require_places: raise when a ready job cannot be placed.
local function require_places(base)
  local missing = missing_place(base)
  if missing then error(missing, 0) end
end

-- require_all_places: the same of a job that may have to wait for its time.
local function require_all_places(base)
  local missing = missing_later(base)
  if missing then error(missing, 0) end
end

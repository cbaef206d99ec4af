-- require_places: raise, with the name of the key, where a ready job cannot be placed. Asked before a job leaves the place it has:
-- Redis does not roll back, and it would be in no list. Needs lib/layout.
local function require_places(base)
  for key, command in pairs({ [ready_line(base)] = "LLEN", [base .. "prioritized"] = "ZCARD" }) do
    local length = redis.pcall(command, key)
    if type(length) == "table" then error(length.err .. ": " .. key, 0) end
  end
end

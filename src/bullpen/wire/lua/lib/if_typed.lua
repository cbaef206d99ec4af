-- if_typed: the reply to a command, or nil where its key has another type: such a key lists nobody. Any other refusal is raised as it
-- is: a key whose slot is on its way to another server must not be taken for one without members.
local function if_typed(...)
  local reply = redis.pcall(...)
  if type(reply) ~= "table" or not reply.err then return reply end
  if string.find(reply.err, "WRONGTYPE", 1, true) then return nil end
  return redis.call(...)
end

-- iteration_id: the id of a scheduler's job at a time; numbers above 14 digits would lose digits in Lua's own form.
local function iteration_id(scheduler_id, slot)
  return "repeat:" .. scheduler_id .. string.format(":%.0f", slot)
end

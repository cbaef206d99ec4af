-- Limits of lanes: of the jobs that were popped those go on that their lanes let start; the others are held, and more are popped.
--#include lib/layout
if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/lane_limits

local ROUNDS = 20
local plain, ranked = {}, {} -- ids from the line; ids and scores
local lane_of, rooms, started_rooms, is_noted = {}, {}, {}, {}
local is_looked, holds = pcall(function()
  local holds
  look_at_lanes_ms, holds = tick_lanes(base, now_ms)
  return holds
end)
if not is_looked then look_at_lanes_ms, holds = now_ms + LOOK_AGAIN_MS, true end

-- may_start: whether the lane of a job lets it start. Who came first goes first: beside held ones all are held. `may_have_place`: it was
-- released, or started before.
local function may_start(lane, rules, job_id, may_have_place)
  if not rooms[lane] then
    rooms[lane], started_rooms[lane] = lane_room(base, lane, rules, now_ms)
    if holds and as_number(redis.pcall("ZCARD", base .. "bp:held:" .. lane)) > 0 then
      local is_released, held = pcall(release_held, base, lane, now_ms) -- what raises here must not cost those that were popped
      if not is_released or held > 0 then rooms[lane] = 0 end
    end
  end
  if started_rooms[lane] <= 0 then return false end
  if may_have_place and type(redis.pcall("ZSCORE", base .. "bp:running:" .. lane, job_id)) == "string" then
    started_rooms[lane] = started_rooms[lane] - 1
    return true
  end
  if rooms[lane] <= 0 then return false end
  rooms[lane], started_rooms[lane] = rooms[lane] - 1, started_rooms[lane] - 1
  return true
end

local function sort_out(job_id, score, fields)
  local lane = fields[1]
  local rules = lane and lane_rules(base, lane)
  if rules and not may_start(lane, rules, job_id, fields[2] or fields[3]) then
    if fields[2] or fields[3] then redis.pcall("ZREM", base .. "bp:running:" .. lane, job_id) end
    hold_in_lane(base, lane, job_id, now_ms)
    rooms[lane], holds = 0, true
    if not is_noted[lane] then
      is_noted[lane] = true
      local _, _, look_ms = lane_room(base, lane, rules, now_ms)
      look_at_lane(base, lane, look_ms)
      look_at_lanes_ms = math.min(look_at_lanes_ms or look_ms, look_ms)
    end
    return
  end
  if rules then lane_of[job_id] = lane end
  if score then
    local at = #ranked
    ranked[at + 1], ranked[at + 2] = job_id, score
  else
    plain[#plain + 1] = job_id
  end
end

-- sort_out_all: what was popped: ids from the line, then ids and scores. What is set for their lanes is asked for once.
local function sort_out_all(ids, count, scored)
  local popped, found, unread, is_asked = {}, {}, {}, {}
  for index = 1, count do popped[index] = ids[index] end
  for index = 1, scored and #scored or 0, 2 do popped[#popped + 1] = scored[index] end
  for index, job_id in ipairs(popped) do
    local fields = redis.pcall("HMGET", base .. job_id, "bplane", "ats", "bpreleased")
    local lane = fields[1]
    if lane and not is_asked[lane] and lane_words_of[base .. lane] == nil then is_asked[lane], unread[#unread + 1] = true, lane end
    found[index] = fields
  end
  if unread[1] then read_lane_words(base, unread) end
  for index, job_id in ipairs(popped) do sort_out(job_id, index > count and scored[2 * (index - count)] or nil, found[index]) end
end

sort_out_all(candidates, from_wait, scores)
for round = 1, ROUNDS do
  local missing = take - #plain - #ranked / 2
  if missing <= 0 then break end
  local further = redis.call("RPOP", wait_key, missing) or {}
  local popped = #further
  local scored = popped < missing and redis.pcall("ZPOPMIN", prioritized_key, missing - popped) or {}
  sort_out_all(further, popped, scored)
  if popped + #scored == 0 then break end
  is_cut = round == ROUNDS
end

ready = nil
candidates, from_wait, scores = plain, #plain, ranked
for index = 1, #ranked, 2 do candidates[#candidates + 1] = ranked[index] end

function start_lanes()
  local started = {} -- by lane: time and id of each of its jobs, as ZADD takes them
  for _, job_id in ipairs(taken_ids) do
    local lane = lane_of[job_id]
    if lane then
      local members = started[lane] or {}
      local at = #members
      members[at + 1], members[at + 2] = now_text, job_id
      started[lane] = members
    end
  end
  for lane, members in pairs(started) do
    local rules, running_key = lane_rules(base, lane), base .. "bp:running:" .. lane
    redis.pcall("ZADD", running_key, unpack(members))
    redis.pcall("PEXPIRE", running_key, RUNNING_KEY_MS)
    if rules.size then
      for at = 2, #members, 2 do redis.pcall("ZREM", base .. "bp:size:" .. lane, members[at]) end
    end
    if rules.most then
      local rate_key, count = base .. "bp:rate:" .. lane, #members / 2
      local reached = as_number(redis.pcall("INCRBY", rate_key, count))
      if reached == count then redis.pcall("PEXPIRE", rate_key, rules.window_ms) end
      if reached >= rules.most then
        local end_ms = now_ms + as_number(redis.pcall("PTTL", rate_key))
        redis.pcall("ZADD", base .. "bp:lanes:held", "XX", "LT", end_ms, lane)
        if look_at_lanes_ms then look_at_lanes_ms = math.min(look_at_lanes_ms, end_ms) end
      end
    end
  end
end

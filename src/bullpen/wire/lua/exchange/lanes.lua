-- Limits of lanes: of the jobs that were popped those go on that their lanes let start; the others are held, and more are popped.
--#include lib/layout
if not meta[1] then line_of[base] = wait_key end -- known already
--#include lib/lane_limits

local ROUNDS = 20
local plain, ranked = {}, {} -- ids from the line; ids and scores
local lane_of, rooms, started_rooms, is_noted = {}, {}, {}, {}
local is_looked = pcall(function() look_at_lanes_ms = tick_lanes(base, now_ms) end)
if not is_looked then look_at_lanes_ms = now_ms + LOOK_AGAIN_MS end

-- may_start: whether the lane of a job lets it start. Who came first goes first: beside held ones all are held.
local function may_start(lane, rules, job_id)
  if not rooms[lane] then
    rooms[lane], started_rooms[lane] = lane_room(base, lane, rules, now_ms)
    if as_number(redis.pcall("ZCARD", base .. "bp:held:" .. lane)) > 0 then
      local is_released, held = pcall(release_held, base, lane, now_ms) -- what raises here must not cost those that were popped
      if not is_released or held > 0 then rooms[lane] = 0 end
    end
  end
  if started_rooms[lane] <= 0 then return false end
  if type(redis.pcall("ZSCORE", base .. "bp:running:" .. lane, job_id)) == "string" then -- it has its place: released, or its worker died
    started_rooms[lane] = started_rooms[lane] - 1
    return true
  end
  if rooms[lane] <= 0 then return false end
  rooms[lane], started_rooms[lane] = rooms[lane] - 1, started_rooms[lane] - 1
  return true
end

local function sort_out(job_id, score)
  local lane = redis.pcall("HGET", base .. job_id, "bplane")
  local rules = type(lane) == "string" and lane_rules(base, lane)
  if rules and not may_start(lane, rules, job_id) then
    redis.pcall("ZREM", base .. "bp:running:" .. lane, job_id)
    hold_in_lane(base, lane, job_id, now_ms)
    rooms[lane] = 0
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
    ranked[#ranked + 1], ranked[#ranked + 2] = job_id, score
  else
    plain[#plain + 1] = job_id
  end
end

for index = 1, from_wait do sort_out(candidates[index], nil) end
for index = 1, scores and #scores or 0, 2 do sort_out(scores[index], scores[index + 1]) end
for round = 1, ROUNDS do
  local missing = take - #plain - #ranked / 2
  if missing <= 0 then break end
  local further = redis.call("RPOP", wait_key, missing) or {}
  for _, job_id in ipairs(further) do sort_out(job_id, nil) end
  local popped = #further
  further = popped < missing and redis.pcall("ZPOPMIN", prioritized_key, missing - popped) or {}
  for index = 1, #further, 2 do sort_out(further[index], further[index + 1]) end
  if popped + #further == 0 then break end
  is_cut = round == ROUNDS
end

ready = nil
candidates, from_wait, scores = plain, #plain, ranked
for index = 1, #ranked, 2 do candidates[#candidates + 1] = ranked[index] end

function start_lanes()
  for _, job_id in ipairs(taken_ids) do
    local lane = lane_of[job_id]
    if lane then
      local rules, running_key = lane_rules(base, lane), base .. "bp:running:" .. lane
      redis.pcall("ZADD", running_key, now_ms, job_id)
      redis.pcall("PEXPIRE", running_key, RUNNING_KEY_MS)
      if rules.size then redis.pcall("ZREM", base .. "bp:size:" .. lane, job_id) end
      if rules.most then
        local rate_key = base .. "bp:rate:" .. lane
        local started = redis.pcall("INCR", rate_key)
        if started == 1 then redis.pcall("PEXPIRE", rate_key, rules.window_ms) end
        if started == rules.most then
          local end_ms = now_ms + as_number(redis.pcall("PTTL", rate_key))
          redis.pcall("ZADD", base .. "bp:lanes:held", "XX", "LT", end_ms, lane)
          if look_at_lanes_ms then look_at_lanes_ms = math.min(look_at_lanes_ms, end_ms) end
        end
      end
    end
  end
end

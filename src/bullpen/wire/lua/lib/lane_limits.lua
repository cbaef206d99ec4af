--#include lib/ready
--#include lib/delayed

-- Limits of lanes: how many of its jobs run at once, how many start per time, whether any do. A job that may not start leaves
-- `prioritized` for `delayed`, due in an hour, so that it is in a place that every client knows: `bp:held:<lane>` lists it, in order,
-- for whoever may release it first. Without us it becomes due by itself. `bp:running:<lane>` lists what runs, and what was released
-- and may start at any moment (score 0): a list and no counter, because a worker that dies does not count down. `bp:rate:<lane>`
-- counts the starts of a window. `bp:lanes:held` says when to look at a lane again: at the end of its window, else every ten seconds,
-- for those that died. A key of another type at one of these places costs the limit and never a job.
local HELD_MS, HELD_KEY_MS, RUNNING_KEY_MS, LOOK_AGAIN_MS, MOST_RELEASED = 3600000, "7200000", "604800000", 10000, 200
local lane_rules_of = {} -- by queue and lane: { concurrency =, most =, window_ms =, paused =, size = }; paused: 1, or until when, or false

local function as_number(reply) return type(reply) == "number" and reply or tonumber(type(reply) == "string" and reply or "") or 0 end

-- any_lane_holds: whether jobs are held at all. If that is not known any more, they become due by themselves.
local function any_lane_holds(base) return redis.call("EXISTS", base .. "bp:lanes:held") == 1 end

-- lane_rules: the limits of a lane, its own before those of all lanes; false when it has none.
local function lane_rules(base, lane)
  local rules = lane_rules_of[base .. lane]
  if rules ~= nil then return rules end
  local function set(place) return lane_setting(base, lane, place) end
  rules = { concurrency = set(2), most = set(3), window_ms = set(4), paused = set(5), size = set(6) }
  if not (rules.window_ms and rules.window_ms >= 1) then rules.most = nil end
  if not rules.concurrency and not rules.most and not rules.paused and not rules.size then rules = false end
  lane_rules_of[base .. lane] = rules
  return rules
end

-- lane_room: how many jobs of a lane may start besides those that were released already, how many released ones the window still takes,
-- and when to look again.
local function lane_room(base, lane, rules, now_ms)
  local room, started_room, look_ms = 1e9, 1e9, now_ms + LOOK_AGAIN_MS
  if rules.paused == 1 then return 0, 0, now_ms + HELD_MS end
  if rules.paused and rules.paused > now_ms then return 0, 0, math.min(rules.paused, now_ms + HELD_MS) end
  local running_key = base .. "bp:running:" .. lane
  if rules.concurrency then room = rules.concurrency - as_number(redis.pcall("ZCARD", running_key)) end
  if rules.most then
    local rate_key = base .. "bp:rate:" .. lane
    started_room = rules.most - as_number(redis.pcall("GET", rate_key))
    if started_room <= 0 then
      local left_ms = as_number(redis.pcall("PTTL", rate_key))
      if left_ms < 0 then redis.pcall("DEL", rate_key) end -- a counter without an end
      look_ms = now_ms + math.max(left_ms, 1)
    end
    room = math.min(room, started_room - as_number(redis.pcall("ZCOUNT", running_key, "0", "0")))
  end
  return room, started_room, look_ms
end

local function look_at_lane(base, lane, look_ms)
  redis.pcall("ZADD", base .. "bp:lanes:held", as_text(look_ms), lane)
  redis.pcall("PEXPIRE", base .. "bp:lanes:held", HELD_KEY_MS)
end

-- hold_in_lane: put a job aside that its lane does not let start.
local held_count = 0
local function hold_in_lane(base, lane, job_id, now_ms)
  place_delayed(base, job_id, now_ms + HELD_MS)
  held_count = held_count + 1
  redis.pcall("ZADD", base .. "bp:held:" .. lane, as_text(now_ms * 1000 + held_count % 1000), job_id)
  redis.pcall("PEXPIRE", base .. "bp:held:" .. lane, HELD_KEY_MS)
end

-- release_held: let jobs that a lane holds stand in line again, as many as may start; they have turns of their own, beside those of
-- jobs that were added later. Returns how many are still held.
local function release_held(base, lane, now_ms)
  local held_key, rules = base .. "bp:held:" .. lane, lane_rules(base, lane)
  local held = as_number(redis.pcall("ZCARD", held_key))
  if held == 0 then
    redis.pcall("ZREM", base .. "bp:lanes:held", lane)
    return 0
  end
  local room, look_ms = MOST_RELEASED, now_ms
  if rules then
    local free, _, later_ms = lane_room(base, lane, rules, now_ms)
    if free <= MOST_RELEASED then room, look_ms = free, later_ms end
  end
  local passed = 0
  while room > 0 and held > 0 and passed < 5 * MOST_RELEASED do
    local first = redis.call("ZRANGE", held_key, "0", as_text(room - 1), "WITHSCORES")
    for index = 1, #first, 2 do
      local job_id, due_ms = first[index], math.floor(tonumber(first[index + 1]) / 1000) + HELD_MS
      local delayed = redis.call("ZSCORE", base .. "delayed", job_id)
      redis.call("ZREM", held_key, job_id)
      held, passed = held - 1, passed + 1
      if delayed and math.floor(tonumber(delayed) / 4096) == due_ms then -- else it has left, or waits for a time of its own
        local priority = redis.pcall("HGET", base .. job_id, "priority")
        local class = priority_class(priority)
        local score = lane_score(base, class, lane, "\1" .. lane) -- raises before the job leaves its place, if it can go nowhere
        redis.call("ZREM", base .. "delayed", job_id)
        redis.call("ZADD", base .. "prioritized", score, job_id)
        if rules then
          redis.pcall("ZADD", base .. "bp:running:" .. lane, "0", job_id)
          -- Who takes it must look whether it has its place.
          if type(priority) == "string" then redis.pcall("HSET", base .. job_id, "bpreleased", "1") end
        end
        redis.pcall("XADD", base .. "events", "*", "event", "waiting", "jobId", job_id, "prev", "delayed")
        room = room - 1
      end
    end
  end
  keep_lane_tags()
  if rules then redis.pcall("PEXPIRE", base .. "bp:running:" .. lane, RUNNING_KEY_MS) end
  if held > 0 then
    look_at_lane(base, lane, look_ms)
  else
    redis.pcall("ZREM", base .. "bp:lanes:held", lane)
  end
  return held
end

-- forget_dead: what a lane lists as running and neither runs nor waits to: its worker died, or another client ended it.
local function forget_dead(base, lane)
  local running_key = base .. "bp:running:" .. lane
  local running = redis.pcall("ZRANGE", running_key, 0, -1)
  if running.err or not running[1] then return end
  for _, job_id in ipairs(running) do
    if redis.call("EXISTS", base .. job_id .. ":lock") == 0 and not redis.call("ZSCORE", base .. "prioritized", job_id)
      and not redis.pcall("LPOS", base .. "active", job_id) then
      redis.pcall("ZREM", running_key, job_id)
    end
  end
end

-- tick_lanes: look at the lanes whose time has come. Returns when the next one comes, or nil; and whether any held jobs.
local function tick_lanes(base, now_ms)
  local key = base .. "bp:lanes:held"
  local first = redis.pcall("ZRANGE", key, "0", "9", "WITHSCORES")
  if first.err or not first[1] then return nil, false end
  if tonumber(first[2]) > now_ms then return tonumber(first[2]), true end
  for index = 1, #first, 2 do
    if tonumber(first[index + 1]) > now_ms then break end
    forget_dead(base, first[index])
    release_held(base, first[index], now_ms)
  end
  return tonumber(redis.pcall("ZRANGE", key, "0", "0", "WITHSCORES")[2]), true
end

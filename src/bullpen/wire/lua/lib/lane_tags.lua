-- Fair sharing: a job of a lane stands in `prioritized` by a tag instead of the plain counter. Score = class * 2^32 + tag; the tag is
-- the lane's next, at least the present one of its class, and the lane's next grows by 1/weight. So lanes take turns whatever each
-- of them has waiting, and every client reads an ordinary set. `bp:lanes:<class>` keeps what is next of each lane that is ahead of
-- the class, and under "" where the class has got to: the head alone does not tell, since whoever is given back stands before it.
-- `pc` follows, so that jobs without a lane come behind the present round.
-- A key of another type there costs the lanes their turns and never a job its place.
-- Numbers are handed to commands as text: to write a number costs the server as much as the command.
local lane_clocks = {} -- by key of the class: { now = tag, next = { lane = tag }, steps = { lane = 1/weight } }

-- read_lane_words: what was set for lanes, asked for in one command, with what follows from the presence of any.
local lane_words_of = {} -- by queue and lane: its words; under the queue alone those of all lanes
local lanes_mark_of = {} -- by queue: "fair", or "limited" where a lane has limits; false when it had no lane yet
local function read_lane_words(base, lanes)
  local fields = {}
  for index, lane in ipairs(lanes) do fields[index] = "bplane:" .. lane end
  local found = redis.pcall("HMGET", base .. "meta", "bplanes", "bplane:", unpack(fields))
  lanes_mark_of[base] = found[1] or false
  for index = 2, #lanes + 2 do
    local words
    for word in string.gmatch(found[index] or "", "%S+") do
      local number = tonumber(word)
      words = words or {}
      words[#words + 1] = number == number and number or false -- not a NaN, which holds every limit and none
    end
    lane_words_of[base .. (lanes[index - 2] or "")] = words or false
  end
end

-- lane_setting: what was set for a lane by its place among the words (configure_lane), its own before that of all lanes; else nil.
local function lane_setting(base, lane, place)
  if lane_words_of[base .. lane] == nil then read_lane_words(base, { lane }) end
  local own, all = lane_words_of[base .. lane], lane_words_of[base]
  return own and own[place] or all and all[place] or nil
end

local function as_text(number) return number % 1 == 0 and string.format("%d", number) or string.format("%.17g", number) end

-- lane_tag: a tag or counter as it is stored; what is none would make every score of the class one that no command takes.
local function lane_tag(stored)
  local tag = type(stored) == "string" and tonumber(stored) or 0
  return tag >= 0 and tag <= 9007199254740991 and tag % 4294967296 or 0
end

-- lane_clock: where a class has got to, and the next tags of `members`, all that are wanted of it.
local function lane_clock(base, class, members)
  local key = base .. "bp:lanes:" .. as_text(class)
  local clock = lane_clocks[key]
  if clock then return clock end
  local first = redis.call("ZRANGEBYSCORE", base .. "prioritized", as_text(class * 4294967296),
    "(" .. as_text((class + 1) * 4294967296), "WITHSCORES", "LIMIT", "0", "1")
  local counter = lane_tag(redis.pcall("GET", base .. "pc"))
  clock = { key = key, now = counter, next = {}, steps = {} }
  if not lanes_mark_of[base] then
    redis.pcall("HSETNX", base .. "meta", "bplanes", "fair")
    lanes_mark_of[base] = "fair"
  end
  if first[2] then
    local tags = redis.pcall("ZMSCORE", key, "", unpack(members))
    clock.now = math.max(tonumber(first[2]) - class * 4294967296, lane_tag(tags[1]))
    for index, member in ipairs(members) do clock.next[member] = math.max(clock.now, lane_tag(tags[index + 1])) end
  else -- nobody waits, so nobody is ahead of anybody
    redis.pcall("DEL", key)
    for _, member in ipairs(members) do clock.next[member] = counter end
  end
  if math.floor(clock.now) > counter then redis.pcall("SET", base .. "pc", as_text(math.floor(clock.now))) end
  lane_clocks[key] = clock
  return clock
end

-- next_score: the place of the lane's next job, as text.
local function next_score(base, class, clock, lane, member)
  local tag, step = clock.next[member], clock.steps[member]
  if not tag then -- another was asked for first
    tag = math.max(clock.now, lane_tag(redis.pcall("ZSCORE", clock.key, member)))
  end
  if not step then
    local weight = lane_setting(base, lane, 1)
    step = weight and weight >= 0.001 and weight <= 1000 and 1 / weight or 1
    clock.steps[member] = step
  end
  clock.next[member] = tag + step
  return as_text(class * 4294967296 + math.min(tag, 4294967295))
end

-- lane_score: the same of one job. What was given is written by keep_lane_tags, once for all. `member`: whose turns are counted, if
-- not the lane's.
local function lane_score(base, class, lane, member)
  member = member or lane
  return next_score(base, class, lane_clock(base, class, { member }), lane, member)
end

-- keep_lane_tags: who is behind the class is nobody to remember; that is looked after where somebody comes new, and the key's time
-- to live with it. Lost, it costs some turns.
local function keep_lane_tags()
  for key, clock in pairs(lane_clocks) do
    local members, count = { as_text(clock.now), "" }, 2
    for lane, tag in pairs(clock.next) do
      members[count + 1], members[count + 2] = as_text(tag), lane
      count = count + 2
    end
    local added = members[3] and redis.pcall("ZADD", key, unpack(members))
    if type(added) == "number" and added > 0 then
      redis.pcall("ZREMRANGEBYSCORE", key, "-inf", "(" .. members[1])
      redis.pcall("PEXPIRE", key, "86400000")
    end
  end
  lane_clocks = {}
end

-- place_in_lanes: give many jobs their places at once. `jobs`: class, lane and id of each, in order.
local function place_in_lanes(base, jobs)
  local lanes_of, unread, is_asked, clocks, scores = {}, {}, {}, {}, {}
  for index = 1, #jobs, 3 do
    local class, lane = jobs[index], jobs[index + 1]
    local lanes = lanes_of[class]
    if not lanes then
      lanes = {}
      lanes_of[class] = lanes
    end
    if not lanes[lane] then
      lanes[lane], lanes[#lanes + 1] = true, lane
      if not is_asked[lane] and lane_words_of[base .. lane] == nil then unread[#unread + 1] = lane end
      is_asked[lane] = true
    end
  end
  if unread[1] then read_lane_words(base, unread) end
  for class, lanes in pairs(lanes_of) do clocks[class] = lane_clock(base, class, lanes) end
  for index = 1, #jobs, 3 do
    local class, lane, at = jobs[index], jobs[index + 1], #scores
    scores[at + 1], scores[at + 2] = next_score(base, class, clocks[class], lane, lane), jobs[index + 2]
  end
  redis.call("ZADD", base .. "prioritized", unpack(scores))
  keep_lane_tags()
end

-- name_lane: a job that is made from stored options is in the lane that they name.
local function name_lane(base, job_id, opts)
  if not string.find(opts or "", '"bplane"', 1, true) then return end
  local is_read, named = pcall(cjson.decode, opts)
  local lane = is_read and type(named) == "table" and named.bplane
  if type(lane) == "string" and lane ~= "" then redis.call("HSET", base .. job_id, "bplane", lane) end
end

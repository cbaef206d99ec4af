-- Fair sharing: a job of a lane stands in `prioritized` by a tag instead of the plain counter. Score = class * 2^32 + tag; the tag is
-- the lane's next, at least the present one of its class, and the lane's next grows by 1/weight. So lanes take turns whatever each
-- of them has waiting, and every client reads an ordinary set. `bp:lanes:<class>` keeps what is next of each lane that is ahead of
-- the class, and under "" where the class has got to: the head alone does not tell, since whoever is given back stands before it.
-- `pc` follows, so that jobs without a lane come behind the present round.
-- A key of another type there costs the lanes their turns and never a job its place.
local lane_clocks = {} -- by key of the class: { now = tag, next = { lane = tag }, steps = { lane = 1/weight } }

-- lane_setting: what was set for a lane by its place among the words (configure_lane), its own before that of all lanes; else nil.
local lane_words_of = {} -- by queue and lane: its own words, those of all
local function lane_setting(base, lane, place)
  local words = lane_words_of[base .. lane]
  if not words then
    words = { {}, {} }
    for index, text in ipairs(redis.pcall("HMGET", base .. "meta", "bplane:" .. lane, "bplane:")) do
      for word in string.gmatch(text or "", "%S+") do
        local number = tonumber(word)
        table.insert(words[index], number == number and number or false) -- not a NaN, which holds every limit and none
      end
    end
    lane_words_of[base .. lane] = words
  end
  return words[1][place] or words[2][place] or nil
end

-- lane_tag: a tag or counter as it is stored; what is none would make every score of the class one that no command takes.
local function lane_tag(stored)
  local tag = type(stored) == "string" and tonumber(stored) or 0
  return tag >= 0 and tag <= 9007199254740991 and tag % 4294967296 or 0
end

local function lane_clock(base, class)
  local key = base .. "bp:lanes:" .. string.format("%.0f", class)
  local clock = lane_clocks[key]
  if clock then return clock end
  local first = redis.call("ZRANGEBYSCORE", base .. "prioritized", class * 4294967296,
    string.format("(%.0f", (class + 1) * 4294967296), "WITHSCORES", "LIMIT", 0, 1)
  local counter = lane_tag(redis.pcall("GET", base .. "pc"))
  clock = { now = counter, next = {}, steps = {} }
  redis.pcall("HSETNX", base .. "meta", "bplanes", "fair")
  if first[2] then
    clock.now = math.max(tonumber(first[2]) - class * 4294967296, lane_tag(redis.pcall("ZSCORE", key, "")))
    redis.pcall("ZREMRANGEBYSCORE", key, "-inf", string.format("(%.17g", clock.now))
  else -- nobody waits, so nobody is ahead of anybody
    redis.pcall("DEL", key)
  end
  if math.floor(clock.now) > counter then redis.pcall("SET", base .. "pc", string.format("%.0f", math.floor(clock.now))) end
  lane_clocks[key] = clock
  return clock
end

-- lane_score: the place of the lane's next job. What was given is written by keep_lane_tags, once for all. `member`: whose turns are
-- counted, if not the lane's.
local function lane_score(base, class, lane, member)
  local clock = lane_clock(base, class)
  member = member or lane
  local tag = clock.next[member]
  if not tag then
    tag = math.max(clock.now, lane_tag(redis.pcall("ZSCORE", base .. "bp:lanes:" .. string.format("%.0f", class), member)))
    local weight = lane_setting(base, lane, 1)
    clock.steps[member] = weight and weight >= 0.001 and weight <= 1000 and 1 / weight or 1
  end
  clock.next[member] = tag + clock.steps[member]
  return class * 4294967296 + math.min(tag, 4294967295)
end

local function keep_lane_tags()
  for key, clock in pairs(lane_clocks) do
    local members = { clock.now, "" }
    for lane, tag in pairs(clock.next) do
      members[#members + 1] = tag
      members[#members + 1] = lane
    end
    if members[3] and type(redis.pcall("ZADD", key, unpack(members))) == "number" then
      redis.pcall("PEXPIRE", key, 86400000) -- lost, it costs some turns
    end
  end
  lane_clocks = {}
end

-- name_lane: a job that is made from stored options is in the lane that they name.
local function name_lane(base, job_id, opts)
  if not string.find(opts or "", '"bplane"', 1, true) then return end
  local is_read, named = pcall(cjson.decode, opts)
  local lane = is_read and type(named) == "table" and named.bplane
  if type(lane) == "string" and lane ~= "" then redis.call("HSET", base .. job_id, "bplane", lane) end
end

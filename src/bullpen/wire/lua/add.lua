--[[ add: store jobs and put each where it belongs.

  Why a script: hash, membership, events and marker must appear together, or Node runs a job without a name.
  Why batched: the fixed cost of a call (reading meta, trimming, marker, list push) is paid once for all.
  A caller that lost the reply repeats its number and gets the first answer again; nothing is stored twice.
  The record of the call is written last: what raises before (a slot that is on its way to another server) leaves none, and the
  repetition does the work.

  KEYS   1 call (one: each costs the server as much as a hundred lines of Lua)
  ARGV   1 base   2 call_number   3 call_ttl_ms   4 clock_and_version   5 name   6 opts   7 place
         clock_and_version: the offset of the test clock, a space, what `meta` shall name as the version
         then per job: data, when name, opts and place above are those of all and no job has an id of its own;
         else, with an empty name above: custom_id ("" = next number)   name   data   opts   place
         place: "" = at the back of the line, now; else five words: timestamp ("-" = now) delay_ms at_ms ("-" = use delay_ms)
         priority flags ("0", "1" = lifo, "2" = replace a finished job with this id, "3" = both); and a sixth, "tied", where the
         options name a deduplication id or a parent; and, of a job in a lane, "@<lane>"
  Reply  "now   number of the first job   id of the last event (none = unknown)", with a space between; or, when ids were taken
         already, { that text, { index, id, state, flat hash of the job that was there first, … } }; without an id, the state is
         why a job was refused, and not stored: -5 its parent does not exist, -7 it is another's child already, -8
         its lane is full, or the words of the server: a key that it needs is of another type
]]
--#include lib/clock
--#include lib/bound

local call_key, queue, call_number, call_ttl_ms, clock_and_version = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local all_name, all_opts, all_place = ARGV[5], ARGV[6], ARGV[7]
local meta_key, wait_key, events_key = queue .. "meta", queue .. "wait", queue .. "events"
local first_arg, stride = 8, all_name == "" and 5 or 1
local count = (#ARGV - first_arg + 1) / stride

-- luacheck: ignore 431
-- (What is included further down has arguments named as locals of this file.)

-- What few calls need stands inside of functions: a script makes its functions anew in each call, and these would be a tenth of it.
-- Events are trimmed by the first one that is added.

-- describe_duplicates: where the jobs are whose ids were taken, and what they hold. Looked for in short lines, and while one call
-- has not passed too many ids. Else it is as good as certain by elimination: in no set and not locked, so it waits, unless nothing
-- lists it at all.
local function describe_duplicates(indexes, blocked)
--#scope
--#include lib/state
  local IDS_LOOKED_AT = 200000
  local function state_of_taken(job_id, looks)
    if looks > 0 then return state_of(queue, job_id) or "waiting" end
    return set_of(queue, job_id) or (redis.call("EXISTS", queue .. job_id .. ":lock") == 1 and "active") or "waiting"
  end
  local described = {}
  local in_line = 0
  for _, line in ipairs({ "wait", "paused", "active" }) do in_line = in_line + (if_typed("LLEN", queue .. line) or 0) end
  local looks = in_line <= 2 * LOOK and IDS_LOOKED_AT / (in_line + 1) or 0
  local function describe(index, job_id)
    local fields = if_typed("HGETALL", queue .. job_id) or {} -- something else than a job may have taken the id
    local at = #described
    looks = looks - 1
    described[at + 1], described[at + 2], described[at + 4] = index, job_id, fields
    described[at + 3] = fields[1] and state_of_taken(job_id, looks) or "unknown"
  end
  for _, index in ipairs(indexes) do describe(index, ARGV[first_arg + (index - 1) * stride]) end
  for position = 1, #blocked, 2 do
    local index, other = blocked[position], blocked[position + 1]
    if type(other) == "string" then
      describe(index, other)
    else
      local at = #described
      local why = type(other) == "table" and other[1] or string.format("%d", other)
      described[at + 1], described[at + 2], described[at + 3], described[at + 4] = index, "", why, {}
    end
  end
  return described
--#end
end

-- clear_finished: make room for a job whose id a finished one still holds. A child that its parent waits for is not cleared: the
-- new job is nobody's child, and the parent would wait for ever.
local function clear_finished(job_id)
--#scope
--#include lib/remove
  local job_key = queue .. job_id
  local parent_key = redis.pcall("HGET", job_key, "parentKey")
  if type(parent_key) == "table" then return false end
  if parent_key and redis.pcall("SISMEMBER", parent_key .. ":dependencies", job_key) == 1 then return false end
  local state = "completed"
  if redis.pcall("ZREM", queue .. state, job_id) ~= 1 then
    state = "failed"
    if redis.pcall("ZREM", queue .. state, job_id) ~= 1 then return false end
  end
  remove_job_keys(job_key)
  redis.pcall("XADD", events_key, "*", "event", "removed", "jobId", job_id, "prev", state)
  return true
--#end
end

local record = redis.call("GET", call_key)
if record then
  local number = string.match(record, "^%d+")
  if number == call_number then
    local now_ms, first_number, taken, tied = string.match(record, "^%d+ (%d+) (%d+) ([%d,]*)(.*)$")
    local indexes, blocked = {}, tied ~= "" and cjson.decode(tied) or {}
    for index in string.gmatch(taken, "%d+") do indexes[#indexes + 1] = tonumber(index) end
    local answer = now_ms .. " " .. first_number .. " "
    return #indexes + #blocked > 0 and { answer, describe_duplicates(indexes, blocked) } or answer
  elseif #number > #call_number or (#number == #call_number and number > call_number) then -- as numbers, without reading them
    return redis.error_reply("BPSTALE a later call of this caller was answered already")
  end
end

local now_ms, now_text = server_now(string.sub(clock_and_version, 1, 2) == "0 " and "0" or string.match(clock_and_version, "^%S+"))
local meta = redis.call("HMGET", meta_key, "paused", "concurrency", "opts.maxLenEvents", "version")
-- First write: refused when memory is full, with nothing written yet.
local first_number = redis.call("INCRBY", queue .. "id", count) - count + 1
local first_id = string.format("%d", first_number) -- Lua would write a number of more than 14 digits with an exponent
if not meta[3] then redis.call("HSET", meta_key, "opts.maxLenEvents", 10000) end
if not meta[4] then redis.call("HSET", meta_key, "version", string.match(clock_and_version, " (.*)$")) end

if meta[4] and meta[4] < "bullmq:6" then -- a client before version 6, or one from 10 on: lib/layout tells
--#scope
--#include lib/layout
  if is_older(meta[4]) then redis.call("HSETNX", meta_key, "bppause", "noticed") end
--#end
end

local most_events = stream_bound(meta[3])
local back, front, duplicates = {}, nil, {}
local stored_ready = false
local last_event

-- Redis does not roll back: what cannot be placed, because a key is of another type, is not stored either, and its caller is told. The
-- other jobs of the call are other callers'. `blocked` has the index of such a job and a list of the server's words. (Events are
-- hints, and never worth failing for.)
local blocked
local function refuse(index, why)
  blocked = blocked or {}
  blocked[#blocked + 1], blocked[#blocked + 2] = index, why
end

-- withdraw: stored jobs that have no place. Nobody has seen them yet.
local function withdraw(job_ids, place_key, reply)
--#scope
--#include lib/remove
  local why, is_meant = { reply.err .. ": " .. place_key }, {}
  for _, job_id in ipairs(job_ids) do
    local job_key = queue .. job_id
    local fields = redis.call("HMGET", job_key, "parentKey", "deid")
    if fields[1] then redis.pcall("SREM", fields[1] .. ":dependencies", job_key) end
    if fields[2] and redis.pcall("GET", queue .. "de:" .. fields[2]) == job_id then redis.call("DEL", queue .. "de:" .. fields[2]) end
    remove_job_keys(job_key)
    redis.pcall("XADD", events_key, "*", "event", "removed", "jobId", job_id, "prev", "waiting")
    is_meant[job_id] = true
  end
  for index = 1, count do
    local job_id = stride == 5 and ARGV[first_arg + (index - 1) * stride] or ""
    if job_id == "" then job_id = string.format("%d", first_number + index - 1) end
    if is_meant[job_id] then refuse(index, why) end
    is_meant[job_id] = nil
  end
--#end
end

-- delay: put a job aside until it is due. Made for the first job that needs it.
local function new_delay()
--#scope
--#include lib/delayed
  local key = queue .. "delayed"
  local length = redis.pcall("ZCARD", key)
  if type(length) == "table" then return function(_, job_id) withdraw({ job_id }, key, length) end end
  return place_delayed
--#end
end
local delay

-- tie: what a job has to do with others, a deduplication id or a parent, before it is stored. Returns the fields that its hash gets
-- for that; nil when it is not to be stored: `blocked` then has its index and the id of the job in its way, or a code. Made for the
-- first job that needs it.
local function new_tie()
--#scope
--#include lib/claim
--#include lib/adopt
  local function tied(index, is_free, job)
    local options, job_key = cjson.decode(job.opts), queue .. job.id
    if not options.parent then
      if not is_free then return nil end
      local owner, is_moved = claim(queue, options.de, job, now_ms)
      if is_moved then wake_when_due(queue) end
      if owner then return refuse(index, owner) end
      return { "deid", options.de.id }
    end
    local parent_key, link = parent_link(options)
    if not lives(parent_key) then return refuse(index, -5) end
    if is_free then
      redis.call("SADD", parent_key .. ":dependencies", job_key)
      return { "parentKey", parent_key, "parent", link }
    end
    if not may_adopt(job_key, parent_key) then return refuse(index, -7) end
    if adopt_stored(job_key, parent_key, link) then settle_adopted(queue, job.id, parent_key, link, now_ms) end
    return nil
  end
  return function(index, is_free, job)
    local is_done, fields = pcall(tied, index, is_free, job)
    if is_done then return fields end
    refuse(index, { type(fields) == "table" and fields.err or fields }) -- of this job alone: those before it have no place yet
    return nil
  end
--#end
end
local tie

-- lanes: what gives jobs of lanes their places. Made for the first of them.
local function new_lanes(first_lane)
--#scope
--#include lib/lane_size
  read_lane_words(queue, { first_lane })
  return { place = place_in_lanes, has_room = lane_has_room, count = count_in_lane, limits = lanes_mark_of[queue] == "limited" }
--#end
end
local lanes
local places = {} -- what stands in a place, once it was read: jobs of a call often have the same
local in_lanes -- class, lane and id of each job

for index = 1, count do
  local arg = first_arg + (index - 1) * stride
  local job_id, name, data, opts, place = "", all_name, ARGV[arg], all_opts, all_place
  if stride == 5 then
    job_id, name, data, opts, place = data, ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 3], ARGV[arg + 4]
  end
  local timestamp, delay_ms, priority, flags, is_tied, lane = now_text, "0", "0", "0", nil, nil
  if place ~= "" then
    local read = places[place]
    if not read then
      read = { string.match(place, "^(%S+) (%S+) (%S+) (%S+) (%S+)(.*)$") }
      if read[6] ~= "" then read[7], read[8] = string.sub(read[6], 1, 5) == " tied", string.match(read[6], " @(.+)$") end
      places[place] = read
    end
    local at_ms
    timestamp, delay_ms, at_ms, priority, flags, is_tied, lane = read[1], read[2], read[3], read[4], read[5], read[7], read[8]
    if timestamp == "-" then timestamp = now_text end
    if at_ms ~= "-" then delay_ms = math.max(0, tonumber(at_ms) - now_ms) end
  end
  if lane then lanes = lanes or new_lanes(lane) end
  local is_free, is_taken, is_refused = true, false, false
  if job_id == "" then
    job_id = index == 1 and first_id or string.format("%d", first_number + index - 1)
  else
    is_taken = redis.call("EXISTS", queue .. job_id) == 1
  end
  if lane and lanes.limits and not (is_taken and flags < "2") and not lanes.has_room(queue, lane, now_ms) then
    is_free, is_refused = false, true
    refuse(index, -8)
  elseif is_taken and not (flags >= "2" and clear_finished(job_id)) then
    is_free = false
    duplicates[#duplicates + 1] = index
    last_event = redis.pcall("XADD", events_key, "MAXLEN", "~", most_events, "*", "event", "duplicated", "jobId", job_id)
  end
  if is_tied and not is_refused then
    tie = tie or new_tie()
    local fields = tie(index, is_free, { id = job_id, name = name, data = data, opts = opts, delay_ms = tonumber(delay_ms) })
    is_free = fields ~= nil
    if fields then redis.call("HSET", queue .. job_id, unpack(fields)) end
  end
  if is_free then
    if lane then
      redis.call("HSET", queue .. job_id, "name", name, "data", data, "opts", opts,
        "timestamp", timestamp, "delay", delay_ms, "priority", priority, "bp", "1", "bplane", lane)
      if lanes.limits then lanes.count(queue, lane, job_id, now_ms) end
    else
      redis.call("HSET", queue .. job_id, "name", name, "data", data, "opts", opts,
        "timestamp", timestamp, "delay", delay_ms, "priority", priority, "bp", "1")
    end
    if index > 1 then
      last_event = redis.pcall("XADD", events_key, "*", "event", "added", "jobId", job_id, "name", name)
    else -- trims the stream for all
      last_event = redis.pcall("XADD", events_key, "MAXLEN", "~", most_events, "*", "event", "added", "jobId", job_id, "name", name)
    end
    if delay_ms ~= "0" and tonumber(delay_ms) > 0 then
      -- Counted from now, not from a timestamp the caller may have set: the promise is "not before this delay".
      delay = delay or new_delay()
      delay(queue, job_id, now_ms + tonumber(delay_ms))
    else
      if lane then
        in_lanes = in_lanes or {}
        local at = #in_lanes
        in_lanes[at + 1], in_lanes[at + 2], in_lanes[at + 3] = tonumber(priority), lane, job_id
      elseif priority ~= "0" then
        local counter, key = redis.pcall("INCR", queue .. "pc"), queue .. "prioritized"
        counter = type(counter) == "number" and counter % 4294967296 or 0 -- no counter but something else: see lib/ready
        local score = string.format("%d", tonumber(priority) * 4294967296 + counter) -- the server would write it much more slowly
        local placed = redis.pcall("ZADD", key, score, job_id)
        if type(placed) == "table" then withdraw({ job_id }, key, placed) end
      elseif flags == "1" or flags == "3" then
        front = front or {}
        front[#front + 1] = job_id
      else
        back[#back + 1] = job_id
      end
      last_event = redis.pcall("XADD", events_key, "*", "event", "waiting", "jobId", job_id)
      stored_ready = true
    end
  end
end
local line_key = wait_key
if meta[1] then
--#scope
--#include lib/layout
  line_key = ready_line(queue)
--#end
end
if in_lanes then
  local is_placed, why = pcall(lanes.place, queue, in_lanes)
  if not is_placed then
    local job_ids = {}
    for index = 3, #in_lanes, 3 do job_ids[#job_ids + 1] = in_lanes[index] end
    withdraw(job_ids, queue .. "prioritized", type(why) == "table" and why or { err = why })
  end
end
local placed = back[1] and redis.pcall("LPUSH", line_key, unpack(back))
if type(placed) == "table" then withdraw(back, line_key, placed) end
placed = front and redis.pcall("RPUSH", line_key, unpack(front))
if type(placed) == "table" then withdraw(front, line_key, placed) end
if delay then
--#scope
--#include lib/due_marker
  wake_when_due(queue)
--#end
end
-- Trimmed before, the stream may exceed its bound by all events of this call.
if count > 100 then redis.pcall("XTRIM", events_key, "MAXLEN", "~", most_events) end
local concurrency = meta[2] and tonumber(meta[2])
local running = concurrency and redis.pcall("LLEN", queue .. "active")
if stored_ready and not meta[1] and not (type(running) == "number" and running >= concurrency) then
  redis.pcall("ZADD", queue .. "marker", "0", "0")
end
local answer = now_text .. " " .. first_id .. " "
local others = table.concat(duplicates, ",")
if blocked and blocked[1] then others = others .. cjson.encode(blocked) end
redis.call("SET", call_key, call_number .. " " .. answer .. others, "PX", call_ttl_ms)
answer = answer .. (type(last_event) == "string" and last_event or "")
return others ~= "" and { answer, describe_duplicates(duplicates, blocked or {}) } or answer

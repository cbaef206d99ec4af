--[[ add_flow: store trees of jobs, in which each parent waits for its children; all of them or none.

  Why a script: a parent whose children are only half there would be released too early, or never.
  Everything that can be refused is checked before the first write. A tree whose root is stored already is left alone: adding a flow
  again stores nothing twice. A leaf that is stored already becomes a child of its parent here, unless it is another's child.
  A caller that lost the reply repeats its number and gets the first answer again.

  KEYS   1 call
  ARGV   1 call_number   2 call_ttl_ms   3 clock_and_version
         then per job, parents before their children: base   job_id   name   data   opts   place (as in add)   role   parent_key   link
         role: "tree" = a root with children, "root" = one without, "parent" = a child with children, "leaf" = one without
         parent_key and link: of the parent, and the `parent` field with its policy; "" for a root that is nobody's child
  Reply  now; or, when roots were there already, { now, { index, id, state, flat hash of each } };
         or { code, index }: -5 the parent of a root does not exist, -7 the id is taken by a job that cannot be the child. Then nothing
         was written.
]]
--#include lib/clock
--#include lib/bound
--#include lib/layout
--#include lib/adopt
--#include lib/remove

local call_key = KEYS[1]
local call_number, call_ttl_ms, clock_and_version = ARGV[1], ARGV[2], ARGV[3]
local FIRST, STRIDE, PER_PUSH = 4, 9, 1000
local count = (#ARGV - FIRST + 1) / STRIDE

local function describe_roots(indexes)
--#scope
--#include lib/state
  local described = {}
  for _, index in ipairs(indexes) do
    local arg, at = FIRST + (index - 1) * STRIDE, #described
    local fields = redis.call("HGETALL", ARGV[arg] .. ARGV[arg + 1])
    described[at + 1], described[at + 2], described[at + 4] = index, ARGV[arg + 1], fields
    described[at + 3] = fields[1] and (state_of(ARGV[arg], ARGV[arg + 1]) or "waiting") or "unknown"
  end
  return described
--#end
end

local record = redis.call("GET", call_key)
if record then
  local number, then_text, taken = string.match(record, "^(%d+) (%d+) ?([%d,]*)$")
  if number == call_number then
    local indexes = {}
    for index in string.gmatch(taken, "%d+") do indexes[#indexes + 1] = tonumber(index) end
    return indexes[1] and { then_text, describe_roots(indexes) } or then_text
  elseif tonumber(number) > tonumber(call_number) then
    return redis.error_reply("BPSTALE a later call of this caller was answered already")
  end
end

-- Look at everything first.
local function require_type(command, key)
  local length = redis.pcall(command, key)
  if type(length) == "table" then error(length.err .. ": " .. key, 0) end
end
local now_ms, now_text = server_now(string.match(clock_and_version, "^%S+"))
local taken, adopted, is_stored, is_skipped, is_skipping = {}, {}, {}, {}, false
local queues, order = {}, {}
for index = 1, count do
  local arg = FIRST + (index - 1) * STRIDE
  local base, job_id, role, parent_key = ARGV[arg], ARGV[arg + 1], ARGV[arg + 6], ARGV[arg + 7]
  local is_root = role == "tree" or role == "root"
  local is_there = redis.call("EXISTS", base .. job_id) == 1
  if is_root then
    is_skipping = is_there
    if is_there then
      taken[#taken + 1] = index
    elseif parent_key ~= "" then
      if not lives(parent_key) then return { -5, index } end
      require_type("SCARD", parent_key .. ":dependencies")
    end
  elseif is_there and not is_skipping then
    if role == "parent" or not may_adopt(base .. job_id, parent_key) then return { -7, index } end
    adopted[#adopted + 1] = index
  end
  is_skipped[index], is_stored[index] = is_skipping, is_there
  if not is_skipping then
    local queue = queues[base]
    if not queue then
      queue = { base = base, count = 0, back = {}, front = {}, events = 0 }
      queues[base], order[#order + 1] = queue, queue
    end
    queue.count = queue.count + 1
  end
end

for _, queue in ipairs(order) do
  redis.call("HLEN", queue.base .. "meta")
  require_all_places(queue.base)
  require_type("ZCARD", queue.base .. "waiting-children")
end
for _, queue in ipairs(order) do
  local meta_key = queue.base .. "meta"
  redis.call("INCRBY", queue.base .. "id", queue.count) -- as every add, though these have ids of their own
  local meta = redis.call("HMGET", meta_key, "opts.maxLenEvents", "version")
  if not meta[1] then redis.call("HSET", meta_key, "opts.maxLenEvents", 10000) end
  if not meta[2] then redis.call("HSET", meta_key, "version", string.match(clock_and_version, " (.*)$")) end
  if is_older(meta[2]) then redis.call("HSETNX", meta_key, "bppause", "noticed") end
  queue.most_events = stream_bound(meta[1])
end

local function tell(queue, ...)
  queue.events = queue.events + 1
  if queue.events % 100 == 1 then
    redis.pcall("XADD", queue.base .. "events", "MAXLEN", "~", queue.most_events, "*", "event", ...)
  else
    redis.pcall("XADD", queue.base .. "events", "*", "event", ...)
  end
end

for index = 1, count do
  if is_stored[index] and not is_skipped[index] then
    local arg = FIRST + (index - 1) * STRIDE
    tell(queues[ARGV[arg]], "duplicated", "jobId", ARGV[arg + 1])
  elseif not is_skipped[index] then
    local arg = FIRST + (index - 1) * STRIDE
    local queue, job_id, name, place = queues[ARGV[arg]], ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 5]
    local role, parent_key = ARGV[arg + 6], ARGV[arg + 7]
    local base = queue.base
    if role == "tree" or role == "parent" then remove_job_keys(base .. job_id) end -- children that another job of this id left behind
    local timestamp, delay_ms, priority, flags = now_text, "0", "0", "0"
    if place ~= "" then
      local at_ms, rest
      timestamp, delay_ms, at_ms, priority, flags, rest = string.match(place, "^(%S+) (%S+) (%S+) (%S+) (%S+)(.*)$")
      local lane = string.match(rest, " @(.+)$")
      if lane then redis.call("HSET", base .. job_id, "bplane", lane) end
      if timestamp == "-" then timestamp = now_text end
      if at_ms ~= "-" then delay_ms = math.max(0, tonumber(at_ms) - now_ms) end
    end
    redis.call("HSET", base .. job_id, "name", name, "data", ARGV[arg + 3], "opts", ARGV[arg + 4],
      "timestamp", timestamp, "delay", delay_ms, "priority", priority, "bp", "1")
    tell(queue, "added", "jobId", job_id, "name", name)
    if role == "tree" or role == "parent" then
      redis.call("ZADD", base .. "waiting-children", timestamp, job_id)
      tell(queue, "waiting-children", "jobId", job_id)
    elseif tonumber(delay_ms) > 0 then
      place_delayed(base, job_id, now_ms + tonumber(delay_ms))
      queue.is_delayed = true
    else
      if priority ~= "0" then
        place_ready(base, job_id, tonumber(priority))
      elseif flags == "1" then
        queue.front[#queue.front + 1] = job_id
      else
        queue.back[#queue.back + 1] = job_id
      end
      tell(queue, "waiting", "jobId", job_id)
      queue.is_ready = true
    end
    if parent_key ~= "" then
      redis.call("HSET", base .. job_id, "parentKey", parent_key, "parent", ARGV[arg + 8])
      redis.call("SADD", parent_key .. ":dependencies", base .. job_id)
    end
  end
end

local function push(command, key, ids)
  for first = 1, #ids, PER_PUSH do redis.call(command, key, unpack(ids, first, math.min(#ids, first + PER_PUSH - 1))) end
end

for _, queue in ipairs(order) do
  push("LPUSH", ready_line(queue.base), queue.back)
  push("RPUSH", ready_line(queue.base), queue.front)
  if queue.is_delayed then wake_when_due(queue.base) end
  if queue.is_ready then wake(queue.base) end
end

-- All are pending before the first counts as finished: the parent is not released while another child is still to come.
local function each_adopted(act)
  for position, index in ipairs(adopted) do
    local arg = FIRST + (index - 1) * STRIDE
    act(position, ARGV[arg], ARGV[arg + 1], ARGV[arg + 7], ARGV[arg + 8])
  end
end
local is_new = {}
each_adopted(function(position, base, job_id, parent_key, link)
  is_new[position] = adopt_stored(base .. job_id, parent_key, link)
end)
each_adopted(function(position, base, job_id, parent_key, link)
  if is_new[position] then settle_adopted(base, job_id, parent_key, link, now_ms) end
end)

redis.call("SET", call_key, call_number .. " " .. now_text .. " " .. table.concat(taken, ","), "PX", call_ttl_ms)
return taken[1] and { now_text, describe_roots(taken) } or now_text

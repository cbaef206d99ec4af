--[[ upsert_scheduler: make a job scheduler or change it, with exactly one job to come.

  The job that was to come is replaced where it still waits. One that runs, or has run, keeps its time; the new one comes after it.
  The same interval keeps its time. A pause outlives the change: then the job comes with the resume.
  A caller that lost the reply repeats its number and gets what is stored.

  KEYS   1 call
  ARGV   1 base   2 call_number   3 call_ttl_ms   4 clock_and_version   5 scheduler_id   6 every ("" = by pattern)
         7 first_ms (by pattern)   8 start_ms ("" = none)   9 offset ("" = none)   10 opts_head   11 data   12 priority
         13 lifo ("1" or "")   14 later_ms   15 digest ("" = not declared in code; else nothing is changed where the same one is stored)
         then field and value, one after the other, of the record
  Reply  { code, slot, flat record }: 1 stored, 2 unchanged, -1 a job of the first time is there already (then only the slot: that time)
]]
--#include lib/clock
--#include lib/trim
--#include lib/iteration_id
--#include lib/iteration
--#include lib/places
--#include lib/pending_iteration

local call_key, base, call_number, call_ttl_ms, clock_and_version = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local scheduler_id, every, start_ms, given_offset = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[8]), tonumber(ARGV[9])
local first_ms, data, digest = tonumber(ARGV[7]), ARGV[11], ARGV[15]
local first_field = 16
local repeat_key, scheduler_key, meta_key = base .. "repeat", base .. "repeat:" .. scheduler_id, base .. "meta"
local MOST_SLOTS = 32 -- of an interval that may be taken by finished jobs

local function answer(code)
  return { code, redis.call("ZSCORE", repeat_key, scheduler_id), redis.call("HGETALL", scheduler_key) }
end

if redis.call("GET", call_key) == call_number then return answer(1) end

local now_ms = server_now(string.match(clock_and_version, "^%S+"))
local old = redis.call("HMGET", scheduler_key, "ic", "every", "offset", "bppaused", "bpdef", "bprun", "name")
local old_slot = tonumber(redis.call("ZSCORE", repeat_key, scheduler_id) or nil)
if digest ~= "" and old[5] == digest and old_slot then
  redis.call("HSET", meta_key, "bpsched:" .. scheduler_id, digest)
  return answer(2)
end

local is_same_interval = every and tonumber(old[2]) == every
local old_id = old_slot and iteration_id(scheduler_id, old_slot)
local old_place = old_id and pending_place(base, old_id)
local is_waiting = old_place or (old_slot and old[4])

local function is_free(slot)
  local job_id = iteration_id(scheduler_id, slot)
  return (job_id == old_id and old_place) or redis.call("EXISTS", base .. job_id) == 0
end

local offset = given_offset or 0
local function aligned()
  local found = math.floor(now_ms / every) * every + offset
  return found > now_ms and found or found + every
end

local slot = first_ms
if every then
  if not given_offset and is_same_interval then offset = tonumber(old[3]) or 0 end
  if is_same_interval and is_waiting then
    slot = old_slot
  elseif is_same_interval and old_slot then
    slot = old_slot + every
    if slot < now_ms then slot = aligned() end
  elseif start_ms then
    slot = math.max(start_ms, now_ms)
  elseif offset > 0 then
    slot = aligned()
  else
    slot = now_ms
  end
  for _ = 1, MOST_SLOTS do
    if is_free(slot) then break end
    slot = slot + every
  end
  if not given_offset and not (is_same_interval and old[3]) then offset = slot - math.floor(slot / every) * every end
end
if not is_free(slot) then return { -1, string.format("%.0f", slot) } end

require_all_places(base)
redis.call("INCR", base .. "id") -- the first write: refused when memory is full, with nothing written yet
redis.call("HSETNX", meta_key, "opts.maxLenEvents", 10000)
redis.call("HSETNX", meta_key, "version", string.match(clock_and_version, " (.*)$"))
trim_events(base)
if old_place then take_pending(base, old_id, old_place) end
redis.call("ZADD", repeat_key, slot, scheduler_id)
redis.call("DEL", scheduler_key)
redis.call("HSET", scheduler_key, "ic", old[1] or 1, "offset", string.format("%.0f", offset), "bp", "1",
  unpack(ARGV, first_field))
if data ~= "{}" then redis.call("HSET", scheduler_key, "data", data) end
if old[6] then redis.call("HSET", scheduler_key, "bprun", old[6]) end
if digest ~= "" then
  redis.call("HSET", scheduler_key, "bpdef", digest)
  redis.call("HSET", meta_key, "bpsched:" .. scheduler_id, digest)
end
if old[4] then
  redis.call("HSET", scheduler_key, "bppaused", old[4], "bpopts", ARGV[10] .. '0"}', "bpstep", 0)
else
  place_iteration(base, {
    id = iteration_id(scheduler_id, slot), scheduler_id = scheduler_id, slot = slot, opts_head = ARGV[10], names_time = not every,
    later_ms = tonumber(ARGV[14]), name = redis.call("HGET", scheduler_key, "name"), data = data,
    priority = priority_class(ARGV[12]), at_front = ARGV[13] == "1", is_ours = true,
  }, now_ms)
end
redis.call("SET", call_key, call_number, "PX", call_ttl_ms)
return answer(1)

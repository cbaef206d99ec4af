--[[ read_line: a page of a list of ids, going on after the ids that were read last.

  Why a script: while somebody reads page by page the line moves, and a position alone would pass over as many jobs as have left
  meanwhile. The ids read last tell where they stand now; they are looked for around the place where they stood, not in the whole
  line. Two that were neighbours and still are give the place; one alone may have been moved, so only `strict` refuses it.

  KEYS   1 line   2 twin (another list, of which only is told whether it has ids)
  ARGV   1 base   2 count   3 newest_first ("1" = from the left end, else from the right, which is next to run)   4 strict ("1" or "")
         5 position (ids in front of the next page)   6 around (where to look for the ids read last)   then these, the latest first
  Reply  { position of the page, { ids from left to right }, twin has ids (0 or 1) }; position -1 when they do not stand around there,
         -2 when, in addition, all of them are deleted
]]
local line_key, twin_key = KEYS[1], KEYS[2]
local base, count, newest_first, strict = ARGV[1], tonumber(ARGV[2]), ARGV[3] == "1", ARGV[4] == "1"
local position, around = tonumber(ARGV[5]), tonumber(ARGV[6])
local FIRST_ANCHOR, REACH = 7, 2500
local twin_has_ids = redis.call("EXISTS", twin_key)

-- From the end where reading began: `first` and the ids after it, in the order of reading.
local function range(first, most)
  if newest_first then return redis.call("LRANGE", line_key, first, first + most - 1) end
  local from_left, ids = redis.call("LRANGE", line_key, -first - most, -first - 1), {}
  for index = #from_left, 1, -1 do ids[#ids + 1] = from_left[index] end
  return ids
end

local function is_in_place(anchor, place)
  return not anchor or place < 1 or redis.call("LINDEX", line_key, newest_first and place - 1 or -place) == anchor
end

-- How many ids stand in front of what was not read yet.
local function find_place()
  local first, place_of = math.max(0, around - REACH), {}
  for offset, id in ipairs(range(first, 2 * REACH)) do place_of[id] = first + offset end
  local latest, before = nil, nil
  for arg = FIRST_ANCHOR, #ARGV do
    local place = place_of[ARGV[arg]]
    if place then
      if before and before - place == 1 then return before end
      latest, before = latest or place, place
    end
  end
  return not strict and latest or nil
end

if #ARGV >= FIRST_ANCHOR
  and not (is_in_place(ARGV[FIRST_ANCHOR], position) and is_in_place(ARGV[FIRST_ANCHOR + 1], position - 1)) then
  local place = find_place()
  if not place then
    local answer = -2
    for arg = FIRST_ANCHOR, #ARGV do
      if redis.call("EXISTS", base .. ARGV[arg]) == 1 then
        answer = -1
        break
      end
    end
    return { answer, {}, twin_has_ids }
  end
  position = place
end
if newest_first then
  return { position, redis.call("LRANGE", line_key, position, position + count - 1), twin_has_ids }
end
return { position, redis.call("LRANGE", line_key, -position - count, -position - 1), twin_has_ids }

--[[ read_line: a page of a list of ids, going on after the ids that were read last.

  Why a script: while somebody reads page by page the line moves, and a position alone would pass over as many jobs as have left
  meanwhile. The ids read last tell where they stand now. When they have left as well: from the running end jobs leave in order, so
  what was in front of them is gone too; what was deleted from the middle only makes the line shorter.

  KEYS   1 line
  ARGV   1 base   2 count   3 newest_first ("1" = from the left end, else from the right, which is next to run)
         4 position (ids in front of the next page)   then the ids read last, the latest first
  Reply  { position of the page, { ids from left to right } }
]]
local line_key = KEYS[1]
local base, count, newest_first, position = ARGV[1], tonumber(ARGV[2]), ARGV[3] == "1", tonumber(ARGV[4])
local anchors = #ARGV - 4
local MOST_SEARCHES, SLACK = 3, 10000

local function place_of(job_id)
  local index = redis.call("LPOS", line_key, job_id, "RANK", newest_first and 1 or -1, "MAXLEN", position + SLACK)
  if not index then return nil end
  return newest_first and index + 1 or redis.call("LLEN", line_key) - index
end

if anchors > 0 and redis.call("LINDEX", line_key, newest_first and position - 1 or -position) ~= ARGV[5] then
  local searches, deleted, found = 0, 0, nil
  for arg = 5, #ARGV do
    if redis.call("EXISTS", base .. ARGV[arg]) == 0 then
      deleted = deleted + 1 -- a search would be in vain
    else
      searches = searches + 1
      found = place_of(ARGV[arg])
      if found or searches == MOST_SEARCHES then break end
    end
  end
  if found then
    position = found
  elseif searches == 0 then
    position = math.max(0, position - deleted)
  else
    position = newest_first and math.max(0, position - anchors) or 0
  end
end
if newest_first then
  return { position, redis.call("LRANGE", line_key, position, position + count - 1) }
end
return { position, redis.call("LRANGE", line_key, -position - count, -position - 1) }

--[[ seek: whether a job stands in one page of a long line, if it has not gone elsewhere by now.

  Why in pages: a search through a million ids at once would hold up everybody. Why the other states each time: a job that leaves the
  line during the search is found where it went.

  KEYS   1 job   2 line
  ARGV   1 base   2 job_id   3 passed (ids between the running end and the page)
  Reply  { state ("" when it was not found), ids passed now (-1: that was the last page) }
]]
--#include lib/line
--#include lib/sets

local job_key, line_key = KEYS[1], KEYS[2]
local base, job_id, passed = ARGV[1], ARGV[2], tonumber(ARGV[3])
local PAGE, OVERLAP = 2 * LOOK, 1000 -- jobs may be put in at the running end meanwhile

if redis.call("EXISTS", job_key) == 0 then return { "unknown", -1 } end
local state = set_of(base, job_id)
if state then return { state, -1 } end
if find_in_line(base, base .. "active", job_id) then return { "active", -1 } end
local page = redis.call("LRANGE", line_key, -passed - PAGE, -passed - 1)
for _, id in ipairs(page) do
  if id == job_id then return { "waiting", -1 } end
end
return { "", #page < PAGE and -1 or passed + PAGE - OVERLAP }

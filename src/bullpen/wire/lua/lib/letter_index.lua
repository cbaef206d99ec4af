-- index_letter, unindex_letter: what is kept of a dead letter beside its entry, so that groups, pages and counts read no letters: by
-- whom, of which cause, and when. The facts of a letter come in one text, "<fingerprint>:<ms>:<tenant>:<cause as JSON>".
-- `index` holds for each letter its place among all (a), in its cause (c), of its tenant (t), and of its tenant in its cause (x); all
-- of one score, so they are in the order of their bytes. Whoever writes or removes entries without these is caught up with by readers.
-- Everything here is made from the entries, so it may vanish, and it ends by itself.
local function index_places(place, fingerprint, tenant, entry_id)
  local tail = ":" .. place .. ":" .. entry_id
  local places = { "a" .. tail, "c" .. fingerprint .. tail }
  if tenant ~= "" then
    places[3] = "t" .. tenant .. tail
    places[4] = "x" .. fingerprint .. ":" .. tenant .. tail
  end
  return places
end

local function index_letter(letter_base, entry_id, facts)
  local fingerprint, failed_ms, tenant, cause = string.match(facts, "^(%x+):(%d+):([^:]*):(.*)$")
  if not fingerprint then return end
  local of, turn = letter_base .. "bp:letters:", redis.pcall("INCR", letter_base .. "id") -- of two in one millisecond
  local place = string.format("%014.0f%012.0f", tonumber(failed_ms), type(turn) == "number" and turn or 0)
  if redis.pcall("HSETNX", of .. "facts", entry_id, place .. ":" .. fingerprint .. ":" .. tenant) ~= 1 then return end
  local members = {}
  for _, member in ipairs(index_places(place, fingerprint, tenant, entry_id)) do
    members[#members + 1] = 0
    members[#members + 1] = member
  end
  redis.pcall("ZADD", of .. "index", unpack(members))
  local is_new = redis.pcall("ZINCRBY", of .. "counts", 1, fingerprint) == "1"
  redis.pcall("HSET", of .. "causes", fingerprint, cause)
  if tenant ~= "" and redis.pcall("HINCRBY", of .. "tenants", fingerprint .. ":" .. tenant, 1) == 1 then is_new = true end
  if is_new or type(turn) ~= "number" or turn % 64 == 0 then -- a new key ends by itself, too; not each time: it is half of the work
    for _, part in ipairs({ "facts", "index", "counts", "causes", "tenants" }) do redis.pcall("EXPIRE", of .. part, 604800) end
  end
end

local function unindex_letter(letter_base, entry_id)
  local of = letter_base .. "bp:letters:"
  local known = redis.pcall("HGET", of .. "facts", entry_id)
  if type(known) ~= "string" then return end
  redis.pcall("HDEL", of .. "facts", entry_id)
  local place, fingerprint, tenant = string.match(known, "^(%d+):(%x+):(.*)$")
  if not place then return end
  redis.pcall("ZREM", of .. "index", unpack(index_places(place, fingerprint, tenant, entry_id)))
  local left = redis.pcall("ZINCRBY", of .. "counts", -1, fingerprint)
  if type(left) == "string" and tonumber(left) <= 0 then
    redis.pcall("ZREM", of .. "counts", fingerprint)
    redis.pcall("HDEL", of .. "causes", fingerprint)
  end
  if tenant ~= "" and redis.pcall("HINCRBY", of .. "tenants", fingerprint .. ":" .. tenant, -1) == 0 then
    redis.pcall("HDEL", of .. "tenants", fingerprint .. ":" .. tenant)
  end
end

-- has_letter: whether the dead letter that a failed job names is that of its latest failure. Another client that retries the job
-- leaves the old name standing, so the number of the take at its end must be the job's.
local function has_letter(entry_id, attempts_started)
  return entry_id and string.match(entry_id, "%-(%d+)$") == (attempts_started or "0")
end

-- swept_until: failures before this instant were all offered to the dead-letter queue, or are too old to be. An hour is left for
-- clients whose clocks are late; before the first sweep nothing is known.
-- An instant to come is none: it would hide every failure until then.
local function swept_until(base, now_ms)
  local swept_ms = tonumber(redis.call("HGET", base .. "meta", "bpswept"))
  if not swept_ms or not (swept_ms >= 0 and swept_ms <= now_ms + 60000) then return nil end
  return swept_ms - 3600000
end

-- has_letter: whether the dead letter that a failed job names is that of its latest failure. Another client that retries the job
-- leaves the old name standing, so the number of the take at its end must be the job's.
local function has_letter(entry_id, attempts_started)
  return entry_id and string.match(entry_id, "%-(%d+)$") == (attempts_started or "0")
end

-- swept_until: failures before this instant were all offered to the dead-letter queue, or are too old to be. An hour is left for
-- clients whose clocks are late; before the first sweep nothing is known.
local function swept_until(base)
  return (tonumber(redis.call("HGET", base .. "meta", "bpswept")) or 0) - 3600000
end

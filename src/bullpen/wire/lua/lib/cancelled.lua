-- was_cancelled: whether a failed job failed because somebody cancelled it. The mark alone does not say so: the job may have failed by
-- itself before its worker heard of it, or another client put it back and left the mark.
local function was_cancelled(mark, failed_reason)
  return mark and failed_reason and string.sub(failed_reason, 1, 9) == "cancelled"
end

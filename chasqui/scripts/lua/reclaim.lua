-- reclaim: take over entries whose consumer has been silent for too long.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer that takes them   3 ms of silence   4 most entries   then the ids of those
--       whose idle time was seen to stand still, for the clock was set back
-- Returns entries as {id, fields, idle ms, deliveries before this one}, as XREADGROUP with CLAIM does.
-- An entry that was deleted while pending comes as {id, nil}: it is acknowledged here, for it can
-- never run.
-- Only the first look asks for the silence: on Redis 6.2 the clock may be set back before the claim, and
-- an entry that is not claimed for that reason must not be taken for a deleted one.
local key, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local found = {}
local function take(held)
  local entry = redis.call('XCLAIM', key, group, consumer, 0, held[1])[1]
  if entry and entry[2] then
    found[#found + 1] = {entry[1], entry[2], math.max(held[3], 1), held[4]}
  else
    redis.call('XACK', key, group, held[1])
    found[#found + 1] = {held[1], false}
  end
end
for _, held in ipairs(redis.call('XPENDING', key, group, 'IDLE', ARGV[3], '-', '+', ARGV[4])) do
  take(held)
end
for i = 5, math.min(#ARGV, 4 + ARGV[4] - #found) do
  local held = redis.call('XPENDING', key, group, ARGV[i], ARGV[i], 1)[1]
  if held and held[3] == 0 then
    take(held)
  end
end
return found

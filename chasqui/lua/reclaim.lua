-- reclaim: take over entries whose consumer has been silent for too long.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer that takes them   3 ms of silence   4 most entries
-- Returns entries as {id, fields, idle ms, deliveries before this one}, as XREADGROUP with CLAIM does.
-- An entry that was deleted while pending comes as {id, nil}: it is acknowledged here, for it can
-- never run.
-- Only the first look asks for the silence: on Redis 6.2 the clock may be set back before the claim, and
-- an entry that is not claimed for that reason must not be taken for a deleted one.
local key, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local found = {}
for _, held in ipairs(redis.call('XPENDING', key, group, 'IDLE', ARGV[3], '-', '+', ARGV[4])) do
  local entry = redis.call('XCLAIM', key, group, consumer, 0, held[1])[1]
  if entry and entry[2] then
    found[#found + 1] = {entry[1], entry[2], held[3], held[4]}
  else
    redis.call('XACK', key, group, held[1])
    found[#found + 1] = {held[1], false}
  end
end
return found

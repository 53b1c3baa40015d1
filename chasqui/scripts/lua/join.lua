-- join: a consumer takes part in a group, which is made if the stream has none.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer, or ''
-- Returns 1 if the group was made, 0 if it was there, or the name of the group that the stream has instead:
-- then nothing was made, for what one group has done is deleted, and lost to the other.
-- A user who may not ask which groups there are takes part unasked.
-- From 0, never from `$`: what is in the stream already must be run.
local key, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local other, made = nil, 1
if redis.call('EXISTS', key) == 1 then
  for _, facts in ipairs(redis.pcall('XINFO', 'GROUPS', key)) do
    for i = 1, #facts, 2 do
      if facts[i] == 'name' and facts[i + 1] == group then
        made = 0
      elseif facts[i] == 'name' then
        other = facts[i + 1]
      end
    end
  end
end
if made == 1 then
  if other then
    return other
  end
  local reply = redis.pcall('XGROUP', 'CREATE', key, group, '0', 'MKSTREAM')
  if reply.err and string.find(reply.err, 'BUSYGROUP', 1, true) then
    made = 0
  elseif reply.err then
    return reply
  end
end
-- So that it is seen before it has read anything. If that is refused, its first read does it.
if consumer ~= '' then
  redis.pcall('XGROUP', 'CREATECONSUMER', key, group, consumer)
end
return made

-- replay: move dead-lettered jobs back into the stream.
-- KEYS  1 dead-letter stream   2 stream   3 answer (what the first arrival of this call answered)
--       then per job: result
-- ARGV  1 most entries to keep in the stream, or ''   2 seconds to remember the answer
--       then per job: id in the dead-letter stream, envelope with attempt 0, name,
--       traceparent, or ''
-- Returns how many were moved. The copy is made first; only who then removes the original keeps it,
-- so two replays at once never double a job and none is lost between two keys. What another job
-- returned that had the same id is deleted: it is no answer to who waits for this one.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there,
-- and not between a copy and its original.
local known = redis.call('GET', KEYS[3])
if known then
  return tonumber(known)
end
redis.call('SET', KEYS[3], '', 'EX', ARGV[2])
redis.call('DEL', KEYS[3])
redis.call('XDEL', KEYS[1], '0-0')
local moved = 0
for i = 3, #ARGV, 4 do
  if #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i]) == 1 then
    local fields = {KEYS[2], '*', 'd', ARGV[i + 1]}
    if ARGV[1] ~= '' then
      fields = {KEYS[2], 'MAXLEN', '~', ARGV[1], '*', 'd', ARGV[i + 1]}
    end
    if ARGV[i + 2] ~= '' then
      fields[#fields + 1] = 'n'
      fields[#fields + 1] = ARGV[i + 2]
    end
    if ARGV[i + 3] ~= '' then
      fields[#fields + 1] = 'traceparent'
      fields[#fields + 1] = ARGV[i + 3]
    end
    redis.call('XADD', unpack(fields))
    redis.call('XDEL', KEYS[1], ARGV[i])
    redis.call('DEL', KEYS[(i + 1) / 4 + 3])
    moved = moved + 1
  end
end
if moved > 0 then
  redis.call('SET', KEYS[3], moved, 'EX', ARGV[2])
end
return moved

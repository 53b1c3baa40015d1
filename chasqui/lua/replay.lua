-- replay: move dead-lettered jobs back into the stream.
-- KEYS  1 dead-letter stream   2 stream
-- ARGV  1 most entries to keep in the stream, or ''   then per job: id in the dead-letter stream,
--       envelope with attempt 0, name
-- Returns how many were moved. The copy is made first; only who then removes the original keeps it,
-- so two replays at once never double a job and none is lost between two keys.
local moved = 0
for i = 2, #ARGV, 3 do
  if #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i]) == 1 then
    local fields = {KEYS[2], '*', 'd', ARGV[i + 1]}
    if ARGV[1] ~= '' then
      fields = {KEYS[2], 'MAXLEN', '~', ARGV[1], '*', 'd', ARGV[i + 1]}
    end
    if ARGV[i + 2] ~= '' then
      fields[#fields + 1] = 'n'
      fields[#fields + 1] = ARGV[i + 2]
    end
    redis.call('XADD', unpack(fields))
    redis.call('XDEL', KEYS[1], ARGV[i])
    moved = moved + 1
  end
end
return moved

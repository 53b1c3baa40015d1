-- add: put a chunk of jobs into the stream, once however often it is sent.
-- KEYS  1 stream   2 applied (bitmap: which chunks of this producer are in)
-- ARGV  1 the chunk's bit   2 seconds to remember it   3 most entries to keep, or ''
--       4 most jobs that may wait, or ''   then per job: envelope, name
-- Returns 1 added, 0 was there already, or {depth} if the queue is full.
if redis.call('GETBIT', KEYS[2], ARGV[1]) == 1 then
  redis.call('EXPIRE', KEYS[2], ARGV[2]) -- a write, so that a WAITAOF behind it waits for the add
  return 0
end
if ARGV[4] ~= '' then
  local depth = redis.call('XLEN', KEYS[1])
  if depth + (#ARGV - 4) / 2 > tonumber(ARGV[4]) then
    return {depth}
  end
end
local stream, keep = KEYS[1], ARGV[3]
for i = 5, #ARGV, 2 do
  local name = ARGV[i + 1]
  if keep == '' then
    if name == '' then
      redis.call('XADD', stream, '*', 'd', ARGV[i])
    else
      redis.call('XADD', stream, '*', 'd', ARGV[i], 'n', name)
    end
  elseif name == '' then
    redis.call('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', ARGV[i])
  else
    redis.call('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', ARGV[i], 'n', name)
  end
end
-- Last: had an XADD failed, a repeat must not find the chunk marked as added.
redis.call('SETBIT', KEYS[2], ARGV[1], 1)
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1

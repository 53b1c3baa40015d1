-- add: put a chunk of jobs into the stream, once however often it is sent.
-- KEYS  1 stream   2 applied (bitmap: which chunks of this producer are in)
-- ARGV  1 the chunk's bit   2 seconds to remember it   3 most entries to keep, or ''
--       4 most jobs that may wait, or ''   5 1 if all jobs have the name in 6, else 0
--       then per job: envelope, and name unless it is in 6
-- Returns 1 added, 0 was there already, or {depth} if the queue is full.
-- The mark is set before the first job and taken back if that is refused: a repeat must find it only if
-- the jobs are in, and jobs must not be in where one of our commands is denied and the caller is told so.
-- Whoever comes again, or too late, is answered without a write that a full server would refuse.
-- In locals: a global costs a look-up each time, and they are what a job of a bulk costs.
local call, argv, stream, keep = redis.call, ARGV, KEYS[1], ARGV[3]
local applied, bit = KEYS[2], argv[1]
if call('GETBIT', applied, bit) == 1 then
  call('EXPIRE', applied, argv[2]) -- a write, so that a WAITAOF behind it waits for the add
  return 0
end
local name, first, step = nil, 6, 2
if argv[5] == '1' then
  name, first, step = argv[6], 7, 1
end
local last = #argv
if argv[4] ~= '' then
  local depth = call('XLEN', stream)
  if depth + (last - first + 1) / step > tonumber(argv[4]) then
    return {depth}
  end
end
call('SETBIT', applied, bit, 1)
local reply = redis.pcall('EXPIRE', applied, argv[2])
-- The first as a question: if it is in, so will be the others.
local fields = {stream, '*', 'd', argv[first]}
if keep ~= '' then
  fields = {stream, 'MAXLEN', '~', keep, '*', 'd', argv[first]}
end
if (name or argv[first + 1]) ~= '' then
  fields[#fields + 1] = 'n'
  fields[#fields + 1] = name or argv[first + 1]
end
if type(reply) ~= 'table' then
  reply = redis.pcall('XADD', unpack(fields))
end
if type(reply) == 'table' then
  call('SETBIT', applied, bit, 0)
  return reply
end
for i = first + step, last, step do
  local name = name or argv[i + 1]
  if keep == '' then
    if name == '' then
      call('XADD', stream, '*', 'd', argv[i])
    else
      call('XADD', stream, '*', 'd', argv[i], 'n', name)
    end
  elseif name == '' then
    call('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', argv[i])
  else
    call('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', argv[i], 'n', name)
  end
end
return 1

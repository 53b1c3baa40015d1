-- flow_begin: put children of a flow into the stream, each once however often it is sent.
-- KEYS  1 stream   2 flow
-- ARGV  1 number of the first child   2 how many children the flow has   3 seconds to keep the flow
--       4 most entries to keep in the stream, or ''   5 most jobs that may wait, or ''
--       6 traceparent of all jobs, or ''   7 how many words of the flow's hash follow
--       then those, field and value by turns   then per child: envelope, name
-- Returns how many children are in, {depth} if the queue is full, or minus how many children the flow has
-- if it was begun with another number of them.
-- Children come in order. Those that are in are passed over; if some before the first one are missing,
-- nothing is added, and the caller begins again from the number that is returned. The chunk with child 0
-- makes the flow. All of a flow's children are counted as unfinished from then on: so its join cannot come
-- before the last child.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
local call, argv, stream, flow = redis.call, ARGV, KEYS[1], KEYS[2]
local first, words = tonumber(argv[1]), tonumber(argv[7])
local total = call('HGET', flow, 'total')
local added = tonumber(call('HGET', flow, 'added') or '0')
local children = (#argv - 7 - words) / 2
if total and total ~= argv[2] then
  return -tonumber(total)
end
if first + children <= added then
  call('EXPIRE', flow, argv[3]) -- a write, so that a WAITAOF behind it waits for the children
  return added
end
if first > added then
  return added
end
if not total and argv[5] ~= '' then
  local depth = call('XLEN', stream)
  if depth + tonumber(argv[2]) > tonumber(argv[5]) then
    return {depth}
  end
end
local denied = redis.pcall('XADD', stream, '0-0', 'd', '')
if not string.find(denied.err, 'greater than 0-0', 1, true) then
  return denied
end
call('EXPIRE', flow, argv[3])
if not total then
  call('HSET', flow, 'total', argv[2], 'left', argv[2], 'failed', '0', 'added', '0', 'trace', argv[6])
end
for i = 8, 7 + words, 1000 do
  call('HSET', flow, unpack(argv, i, math.min(i + 999, 7 + words)))
end
for i = 8 + words + 2 * (added - first), #argv, 2 do
  local fields = {stream, '*', 'd', argv[i]}
  if argv[4] ~= '' then
    fields = {stream, 'MAXLEN', '~', argv[4], '*', 'd', argv[i]}
  end
  if argv[i + 1] ~= '' then
    fields[#fields + 1] = 'n'
    fields[#fields + 1] = argv[i + 1]
  end
  if argv[6] ~= '' then
    fields[#fields + 1] = 'traceparent'
    fields[#fields + 1] = argv[6]
  end
  call('XADD', unpack(fields))
end
added = first + children
if added == tonumber(argv[2]) then
  call('HSET', flow, 'added', added, 'begun', '1')
else
  call('HSET', flow, 'added', added)
end
call('EXPIRE', flow, argv[3])
return added

-- spark_publish: move a staged chunk of jobs to where they belong.
-- KEYS  1 record of the write   2 stage (hash: number to chunk)   3 stream   4 delayed set   5 wake list
-- ARGV  1 epoch   2 number of the chunk   3 most jobs that may wait in the stream   4 the run that asks
-- A chunk is, in msgpack: a name or one for each job, a due time (ms; 0 for now) or one for each, the
-- envelopes. What was moved leaves '' behind: sent twice, the second one finds nothing to move.
-- Returns {jobs moved, 1 if some of the chunk are left, jobs in the stream, jobs left of the write};
-- {-1} if the record is not publishing this epoch any more; {-2} if the chunk is gone.
-- The copy is made before the original goes: if it cannot be made, the script ends there.
local record = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'left')
if record[1] ~= ARGV[1] or record[2] ~= 'publishing' then
  return {-1}
end
local stream, delayed = KEYS[3], KEYS[4]
local chunk = redis.call('HGET', KEYS[2], ARGV[2])
if not chunk then
  return {-2}
end
local depth, most = redis.call('XLEN', stream), tonumber(ARGV[3])
if chunk == '' then
  return {0, 0, depth, tonumber(record[3])}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local earliest = tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2])
local rings = false

-- The id is the envelope's first element: [array header][str header][id].
local function id_of(envelope)
  local _, kind, high, low = string.byte(envelope, 1, 4)
  if kind >= 160 and kind <= 191 then
    return string.sub(envelope, 3, kind - 158)
  elseif kind == 217 then
    return string.sub(envelope, 4, 3 + high)
  end
  return string.sub(envelope, 5, 4 + high * 256 + low)
end

local names, dues, envelopes = cmsgpack.unpack(chunk)
local name = type(names) == 'string' and names
local due = type(dues) == 'number' and dues
local call, size, moved = redis.call, #envelopes, 0
while moved < size and depth < most do
  local i = moved + 1
  local envelope, name, due = envelopes[i], name or names[i], due or dues[i]
  if due > now then
    local member = struct.pack('<I4', #name) .. name .. envelope
    call('ZADD', delayed, string.format('%.0f', due), member)
    -- A key that is not in KEYS, but of the same hash tag: the ids are known here only.
    local didx = string.sub(delayed, 1, -8) .. 'didx:' .. id_of(envelope)
    call('SET', didx, member, 'EX', math.ceil((due - now) / 1000) + 3600)
    if not earliest or due < earliest then
      earliest, rings = due, true
    end
  elseif name == '' then
    call('XADD', stream, '*', 'd', envelope)
    depth = depth + 1
  else
    call('XADD', stream, '*', 'd', envelope, 'n', name)
    depth = depth + 1
  end
  moved = i
end

local function behind(list)
  local rest = {}
  for i = moved + 1, size do
    rest[#rest + 1] = list[i]
  end
  return rest
end

if moved > 0 then
  local rest = ''
  if moved < size then
    rest = cmsgpack.pack(name or behind(names), due or behind(dues), behind(envelopes))
  end
  call('HSET', KEYS[2], ARGV[2], rest)
  call('HINCRBY', KEYS[1], 'left', -moved)
  call('HINCRBY', KEYS[1], 'by:' .. ARGV[4], moved)
end
if rings and call('EXISTS', KEYS[5]) == 0 then
  call('LPUSH', KEYS[5], '1')
  call('EXPIRE', KEYS[5], 60)
end
return {moved, moved < size and 1 or 0, depth, record[3] - moved}

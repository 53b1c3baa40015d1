-- spark_publish: move staged jobs to where they belong, the oldest first.
-- KEYS  1 record of the write   2 stage list   3 stream   4 delayed set   5 wake list
-- ARGV  1 epoch   2 most jobs to move   3 most jobs that may wait in the stream
-- Returns {jobs moved, jobs left in the list, jobs in the stream}; {-1, 0, 0} if the record is not
-- publishing this epoch any more. Sent twice it moves the next jobs, never one of them twice.
-- The copy is made before the original goes: if it cannot be made, the script ends there.
local record = redis.call('HMGET', KEYS[1], 'epoch', 'state')
if record[1] ~= ARGV[1] or record[2] ~= 'publishing' then
  return {-1, 0, 0}
end
local list, stream, delayed = KEYS[2], KEYS[3], KEYS[4]
local left, depth = redis.call('LLEN', list) / 3, redis.call('XLEN', stream)
local most = math.min(tonumber(ARGV[2]), tonumber(ARGV[3]) - depth, left)
if most <= 0 then
  return {0, left, depth}
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

local jobs = redis.call('LRANGE', list, 0, most * 3 - 1)
for i = 1, #jobs, 3 do
  local envelope, name, due = jobs[i], jobs[i + 1], tonumber(jobs[i + 2])
  if due > now then
    local member = struct.pack('<I4', #name) .. name .. envelope
    redis.call('ZADD', delayed, string.format('%.0f', due), member)
    -- A key that is not in KEYS, but of the same hash tag: the ids are known here only.
    local didx = string.sub(delayed, 1, -8) .. 'didx:' .. id_of(envelope)
    redis.call('SET', didx, member, 'EX', math.ceil((due - now) / 1000) + 3600)
    if not earliest or due < earliest then
      earliest, rings = due, true
    end
  elseif name == '' then
    redis.call('XADD', stream, '*', 'd', envelope)
    depth = depth + 1
  else
    redis.call('XADD', stream, '*', 'd', envelope, 'n', name)
    depth = depth + 1
  end
end
redis.call('LTRIM', list, #jobs, -1)
if rings and redis.call('EXISTS', KEYS[5]) == 0 then
  redis.call('LPUSH', KEYS[5], '1')
  redis.call('EXPIRE', KEYS[5], 60)
end
return {#jobs / 3, left - #jobs / 3, depth}

-- spark_done: all of a write is published. Drops its stages, and those that other runs staged for the
-- same epoch or an earlier one: nobody can publish them any more.
-- KEYS  1 record of the write   2 its stages (hash: key to 'epoch jobs ttl')   then those of the record
-- ARGV  1 epoch   2 seconds to remember it   3 the run that asks
-- Returns {'done', jobs that this run published, or -1 if a later epoch has replaced the record};
-- {'left'} some jobs are not published; {'gone'} there is no such record any more.
local record = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'left', 'by:' .. ARGV[3])
local epoch, last = tonumber(ARGV[1]), tonumber(record[1])
if not last or last < epoch then
  return {'gone'}
elseif last > epoch then
  return {'done', -1}
end
if record[2] == 'publishing' then
  if tonumber(record[3]) ~= 0 then
    return {'left'}
  end
  for i = 3, #KEYS do
    redis.call('UNLINK', KEYS[i])
    redis.call('HDEL', KEYS[2], KEYS[i])
  end
  redis.call('HSET', KEYS[1], 'state', 'done', 'done', redis.call('TIME')[1])
  redis.call('HDEL', KEYS[1], 'keys')
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
local staged = redis.call('HGETALL', KEYS[2])
for i = 1, #staged, 2 do
  local of = tonumber(string.match(staged[i + 1], '^%d+'))
  if of and of <= epoch then
    -- A key that is not in KEYS, but of the same hash tag.
    redis.call('UNLINK', staged[i])
    redis.call('HDEL', KEYS[2], staged[i])
  end
end
return {'done', tonumber(record[4] or 0)}

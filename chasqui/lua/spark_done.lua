-- spark_done: all of a write is published.
-- KEYS  1 record of the write   then its stage lists
-- ARGV  1 epoch   2 seconds to remember it
-- Returns 1 noted, 0 a stage list still holds jobs or the record is of another epoch.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return 0
end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    return 0
  end
end
redis.call('HSET', KEYS[1], 'state', 'done')
redis.call('HDEL', KEYS[1], 'keys')
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1

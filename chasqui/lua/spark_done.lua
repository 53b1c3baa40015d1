-- spark_done: all of a write is published.
-- KEYS  1 record of the write   then its stages
-- ARGV  1 epoch   2 seconds to remember it
-- Returns 1 noted, 0 some jobs are not published or the record is of another epoch.
local record = redis.call('HMGET', KEYS[1], 'epoch', 'left')
if record[1] ~= ARGV[1] or tonumber(record[2]) ~= 0 then
  return 0
end
for i = 2, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
redis.call('HSET', KEYS[1], 'state', 'done')
redis.call('HDEL', KEYS[1], 'keys')
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1

-- lease_take: take a lease if it is free, renew it if it is mine.
-- KEYS  1 lock
-- ARGV  1 holder   2 seconds until it ends by itself
-- Returns -1 it is mine now, else the ms until it may be free (1000 if whoever wrote it set no end).
local holder = redis.call('GET', KEYS[1])
if not holder then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
  return -1
end
if holder == ARGV[1] then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
  return -1
end
local left = redis.call('PTTL', KEYS[1])
return left < 0 and 1000 or left

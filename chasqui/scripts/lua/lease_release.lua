-- lease_release: end a lease before its time, if it is mine.
-- KEYS  1 lock   2 list that those who want the lease next sleep on
-- ARGV  1 holder
-- Returns 1 released, 0 it was not mine. One of the sleepers is woken.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('LPUSH', KEYS[2], '1')
-- With no sleeper there the lease is simply free: nobody needs to be told later.
redis.call('EXPIRE', KEYS[2], 1)
return 1

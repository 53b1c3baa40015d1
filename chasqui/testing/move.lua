-- move: take ARGV[1] ms off the due time of every delayed job. Only servers of tests run it.
-- KEYS  1 delayed set
-- ARGV  1 by how much (ms)
-- Returns how many jobs are due first, at one time.
local all = ARGV[1] == '0' and {} or redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #all, 2000 do
  local some = {}
  for j = i, math.min(i + 1999, #all), 2 do
    some[#some + 1] = string.format('%.0f', all[j + 1] - ARGV[1])
    some[#some + 1] = all[j]
  end
  redis.call('ZADD', KEYS[1], 'XX', unpack(some))
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return first[2] and redis.call('ZCOUNT', KEYS[1], '-inf', first[2]) or 0

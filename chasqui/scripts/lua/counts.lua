-- counts: how much of everything a queue holds.
-- KEYS  1 stream   2 delayed set   3 dead-letter stream   4 repeat set   5 paused
-- ARGV  1 group
-- Returns {length, pending, delayed, dlq, repeatables, ms that the oldest job has been in the stream,
-- 1 if paused}. A group that is not there has nothing pending.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local pending = 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local facts = {}
    for i = 1, #group, 2 do
      facts[group[i]] = group[i + 1]
    end
    if facts['name'] == ARGV[1] then
      pending = facts['pending']
    end
  end
end
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
local lag = 0
if oldest[1] then
  lag = math.max(0, now - tonumber(string.match(oldest[1][1], '^(%d+)')))
end
return {redis.call('XLEN', KEYS[1]), pending, redis.call('ZCARD', KEYS[2]), redis.call('XLEN', KEYS[3]),
        redis.call('ZCARD', KEYS[4]), lag, redis.call('EXISTS', KEYS[5])}

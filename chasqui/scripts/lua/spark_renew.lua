-- spark_renew: a consuming query still works on its batch: the idle time of its jobs starts anew.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   3 id to go on behind   4 most jobs
-- Returns the id to go on behind, or '' at the end. Deliveries are not counted.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], '(' .. ARGV[3], '+', ARGV[4], ARGV[2])
local ids = {}
for i, one in ipairs(held) do
  ids[i] = one[1]
end
if #ids == 0 then
  return ''
end
ids[#ids + 1] = 'JUSTID'
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(ids))
return #held < tonumber(ARGV[4]) and '' or held[#held][1]

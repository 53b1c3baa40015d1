-- spark_ack: a batch of a consuming query is done: acknowledge and delete what its consumer holds.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   3 most jobs
-- Returns how many. What somebody else has reclaimed meanwhile is his.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[3], ARGV[2])
local ids = {}
for i, one in ipairs(held) do
  ids[i] = one[1]
end
if #ids > 0 then
  redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
  redis.call('XDEL', KEYS[1], unpack(ids))
end
return #ids

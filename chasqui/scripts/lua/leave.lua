-- leave: a consumer that holds nothing leaves its group.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer
-- Returns 1 if it left, 0 if it holds entries: deleting it would take them from everybody.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1

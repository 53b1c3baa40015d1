-- spark_claim: take new jobs for a batch of a consuming query, without moving them to the driver.
-- KEYS  1 stream   2 paused
-- ARGV  1 group   2 consumer   3 most jobs
-- Returns how many were taken; none while the queue is paused.
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
return reply and reply[1] and #reply[1][2] or 0

-- spark_drop: drop stages, but none that a recorded write still has to publish.
-- KEYS  1 record of the write   then the stages
-- Returns how many were dropped.
local record = redis.call('HMGET', KEYS[1], 'state', 'keys')
local kept = record[1] == 'publishing' and '\n' .. record[2] .. '\n' or ''
local dropped = 0
for i = 2, #KEYS do
  if not string.find(kept, '\n' .. KEYS[i] .. '\n', 1, true) then
    dropped = dropped + redis.call('UNLINK', KEYS[i])
  end
end
return dropped

-- spark_drop: drop stages, but none that a recorded write still has to publish; or forget a write.
-- KEYS  1 record of the write   2 its stages (hash: key to 'epoch jobs ttl')   then the stages to drop
-- ARGV  1 'forget' to drop the record and all stages of the write instead
-- Returns how many stages were dropped.
local record = redis.call('HMGET', KEYS[1], 'state', 'keys')
local dropped = 0

-- The keys are not all in KEYS, but of the same hash tag.
local function drop(key)
  dropped = dropped + redis.call('UNLINK', key)
  redis.call('HDEL', KEYS[2], key)
end

if ARGV[1] == 'forget' then
  for key in string.gmatch(record[2] or '', '[^\n]+') do
    drop(key)
  end
  for _, key in ipairs(redis.call('HKEYS', KEYS[2])) do
    drop(key)
  end
  redis.call('UNLINK', KEYS[1])
  return dropped
end
local kept = record[1] == 'publishing' and '\n' .. record[2] .. '\n' or ''
for i = 3, #KEYS do
  if not string.find(kept, '\n' .. KEYS[i] .. '\n', 1, true) then
    drop(KEYS[i])
  end
end
return dropped

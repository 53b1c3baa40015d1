-- spark_begin: record what a write is about to publish, unless that was recorded before.
-- KEYS  1 record of the write (hash: epoch, state, keys, jobs, left, at)   then the stages
-- ARGV  1 epoch   2 jobs in all of them   then per stage: its chunks
-- Returns {'mine'} recorded, go on; {'done'} this epoch, or a later one, is published; {'resume',
-- epoch, key, …} an earlier try was recorded and must be published first: it holds the same rows if it
-- is of the same epoch; {'lost', key} a stage is not what its task left.
-- From here on nothing expires until all is published: a record found later can always be resumed.
local known = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'keys')
local epoch, last = tonumber(ARGV[1]), tonumber(known[1])
if last and known[2] == 'publishing' and last <= epoch then
  local answer = {'resume', last}
  for key in string.gmatch(known[3], '[^\n]+') do
    answer[#answer + 1] = key
  end
  return answer
end
if last and last >= epoch then
  return {'done'}
end
for i = 2, #KEYS do
  if redis.call('HLEN', KEYS[i]) ~= tonumber(ARGV[i + 1]) then
    return {'lost', KEYS[i]}
  end
end
for i = 2, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', 'publishing', 'jobs', ARGV[2],
           'left', ARGV[2], 'keys', table.concat(KEYS, '\n', 2), 'at', redis.call('TIME')[1])
redis.call('PERSIST', KEYS[1])
return {'mine'}

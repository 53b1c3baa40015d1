-- spark_begin: record what a write is about to publish, unless that was recorded before.
-- KEYS  1 record of the write (hash: epoch, state, keys, jobs, at)   then the stage lists
-- ARGV  1 epoch   then per stage list: its jobs
-- Returns {'mine'} recorded, go on; {'done'} this epoch, or a later one, is published; {'resume',
-- epoch, key, …} an earlier try was recorded and must be published first: it holds the same rows if it
-- is of the same epoch; {'lost', key} a stage list is not what its task left.
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
local jobs = 0
for i = 2, #KEYS do
  if redis.call('LLEN', KEYS[i]) ~= tonumber(ARGV[i]) * 3 then
    return {'lost', KEYS[i]}
  end
  jobs = jobs + tonumber(ARGV[i])
end
for i = 2, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', 'publishing', 'jobs', jobs,
           'keys', table.concat(KEYS, '\n', 2), 'at', redis.call('TIME')[1])
redis.call('PERSIST', KEYS[1])
return {'mine'}

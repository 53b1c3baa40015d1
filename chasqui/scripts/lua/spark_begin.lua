-- spark_begin: record what a write is about to publish, unless that was recorded before.
-- KEYS  1 record of the write (hash: epoch, state, jobs, left, keys, at, done, by:<run>)   then the stages
-- ARGV  1 epoch   2 jobs in all of them   3 '1' if the stages hold all rows of the write, '0' if a task
--       left rows out since it saw a record   then per stage: its chunks
-- Returns {'mine'} recorded, go on; {'done', epoch, jobs, unix s} this epoch, or a later one, is
-- recorded as done; {'resume', epoch, jobs, left, key, …} an earlier try was recorded and must be
-- published first: it holds the same rows if it is of the same epoch; {'lost', key} a stage is not what
-- its task left; {'gone'} the record that a task saw is not there any more.
-- From here on nothing expires until all is published: a record found later can always be resumed.
local known = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'jobs', 'left', 'keys', 'done', 'at')
local epoch, last = tonumber(ARGV[1]), tonumber(known[1])
if last and known[2] == 'publishing' and last <= epoch then
  local answer = {'resume', last, tonumber(known[3]), tonumber(known[4])}
  for key in string.gmatch(known[5], '[^\n]+') do
    answer[#answer + 1] = key
  end
  return answer
end
if last and last >= epoch then
  return {'done', last, tonumber(known[3]), tonumber(known[6] or known[7])}
end
if ARGV[3] == '0' then
  return {'gone'}
end
for i = 2, #KEYS do
  if redis.call('HLEN', KEYS[i]) ~= tonumber(ARGV[i + 2]) then
    return {'lost', KEYS[i]}
  end
end
for i = 2, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'state', 'publishing', 'jobs', ARGV[2],
           'left', ARGV[2], 'keys', table.concat(KEYS, '\n', 2), 'at', redis.call('TIME')[1])
redis.call('PERSIST', KEYS[1])
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if name == 'done' or string.sub(name, 1, 3) == 'by:' then -- of the epoch before
    redis.call('HDEL', KEYS[1], name)
  end
end
return {'mine'}

-- cancel: take delayed jobs back before they are due.
-- KEYS  1 delayed set   2 answer (what the first arrival of this call answered)
--       then per job: didx, dlid, trace
-- ARGV  1 seconds to remember the answer
-- Returns per job '1' cancelled, '0' there was nothing to cancel. Where the member is gone already
-- (promoted), the marker stays: the job runs, and its id is taken.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
-- What only deletes comes first, so that jobs can be cancelled while memory is short.
local known = redis.call('GET', KEYS[2])
if known then
  return known
end
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[2], '', 'EX', ARGV[1])
redis.call('DEL', KEYS[2])
local answers, some = {}, false
for i = 3, #KEYS, 3 do
  local member = redis.call('GET', KEYS[i])
  if member and redis.call('ZREM', KEYS[1], member) == 1 then
    redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
    answers[#answers + 1] = '1'
    some = true
  else
    answers[#answers + 1] = '0'
  end
end
local answer = table.concat(answers)
if some then
  redis.call('SET', KEYS[2], answer, 'EX', ARGV[1])
end
return answer

-- cancel: take a delayed job back before it is due.
-- KEYS  1 delayed set   then per job: didx, dlid
-- Returns per job '1' cancelled, '0' there was nothing to cancel. Where the member is gone already
-- (promoted), the marker stays: the job runs, and its id is taken.
local answers = {}
for i = 2, #KEYS, 2 do
  local member = redis.call('GET', KEYS[i])
  if member and redis.call('ZREM', KEYS[1], member) == 1 then
    redis.call('DEL', KEYS[i], KEYS[i + 1])
    answers[#answers + 1] = '1'
  else
    answers[#answers + 1] = '0'
  end
end
return table.concat(answers)

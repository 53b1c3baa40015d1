-- cancel: take delayed jobs back before they are due, and those that wait for their retry.
-- KEYS  1 delayed set   2 answer (what the first arrival of this call answered)
--       then per job: didx, dlid, trace
-- ARGV  1 seconds to remember the answer
-- Returns per job '1' cancelled, '0' there was nothing to cancel. Where the member is gone already
-- (promoted), the marker stays: the job runs, and its id is taken. It is too if the job has run before.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
-- What only deletes comes first, so that jobs can be cancelled while memory is short.
local known = redis.call('GET', KEYS[2])
if known then
  return known
end
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[2], '', 'EX', ARGV[1])
redis.call('DEL', KEYS[2])

-- Where the element behind one of an envelope begins: numbers, strings and bins are what it starts with.
local function behind(text, at)
  local kind = string.byte(text, at)
  if kind < 128 then
    return at + 1
  elseif kind >= 160 and kind <= 191 then
    return at + kind - 159
  elseif kind >= 204 and kind <= 207 then
    return at + 1 + 2 ^ (kind - 204)
  end
  local first, size = at + 1 + ({[196] = 1, [197] = 2, [198] = 4, [217] = 1, [218] = 2})[kind], 0
  for i = at + 1, first - 1 do
    size = size * 256 + string.byte(text, i)
  end
  return first + size
end

-- Whether the job has run: its attempt, behind name, id, payload and time, is not 0.
local function has_run(member)
  local is_read, attempt = pcall(function()
    local at = struct.unpack('<I4', member) + 6
    return string.byte(member, behind(member, behind(member, behind(member, at))))
  end)
  return is_read and attempt ~= 0
end

local answers, some = {}, false
for i = 3, #KEYS, 3 do
  local member = redis.call('GET', KEYS[i])
  if member and redis.call('ZREM', KEYS[1], member) == 1 then
    redis.call('DEL', KEYS[i], KEYS[i + 2])
    if not has_run(member) then
      redis.call('DEL', KEYS[i + 1])
    end
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

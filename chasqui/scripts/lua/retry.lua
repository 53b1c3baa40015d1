-- retry: runs failed and are to be repeated: entries leave the stream for the delayed set.
-- KEYS  1 stream   2 delayed set   3 wake list   4 traces   then per job: didx, and its trace if it has
--       one
-- ARGV  1 group   2 consumer that must still own them   then per job: entry id, ms from now, member,
--       its trace, or ''
-- Returns per job '1' moved, '0' not ours any more. The copies are made before the originals go: if
-- one cannot be made, the script ends there, and its entry stays pending. So do all if they may not go:
-- each command is used once to no effect before the first copy is made.
-- A job whose didx cannot be written runs again all the same, and cannot be cancelled meanwhile.
-- A new earliest job rings the wake list, which the promoter sleeps on.
local call, argv, key, delayed, group, owner = redis.call, ARGV, KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local earliest = tonumber(call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2])
call('ZADD', delayed, 'XX', 0, '')
call('XACK', key, group, '0-0')
call('XDEL', key, '0-0')
local rings, refusal = false, nil
local answers, copied = {}, {}
local own, traced_s = 5, 0
for i = 3, #argv, 4 do
  local id, trace = argv[i], argv[i + 3]
  if owns(key, group, owner, id) then
    local due = now + tonumber(argv[i + 1])
    local ttl = math.ceil(tonumber(argv[i + 1]) / 1000) + 3600
    if trace ~= '' then
      redis.pcall('SET', KEYS[own + 1], trace, 'EX', ttl)
      traced_s = math.max(traced_s, ttl)
    end
    local reply = redis.pcall('ZADD', delayed, string.format('%.0f', due), argv[i + 2])
    if type(reply) == 'table' then
      refusal = reply
      break
    end
    redis.pcall('SET', KEYS[own], argv[i + 2], 'EX', ttl)
    copied[#copied + 1] = id
    if not earliest or due < earliest then
      earliest, rings = due, true
    end
    answers[#answers + 1] = '1'
  else
    answers[#answers + 1] = '0'
  end
  own = own + (trace == '' and 1 or 2)
end
if #copied > 0 then
  call('XACK', key, group, unpack(copied))
  call('XDEL', key, unpack(copied))
end
-- The jobs have moved by now: a bell that cannot be rung must not make that look undone.
if traced_s > 0 then
  local left_s = redis.pcall('TTL', KEYS[4])
  if type(left_s) == 'number' and left_s < traced_s then
    redis.pcall('SET', KEYS[4], '1', 'EX', traced_s)
  end
end
if rings and redis.pcall('EXISTS', KEYS[3]) == 0 then
  redis.pcall('LPUSH', KEYS[3], '1')
  redis.pcall('EXPIRE', KEYS[3], 60)
end
return refusal or table.concat(answers)

-- reschedule: give a delayed job another due time.
-- KEYS  1 delayed set   2 didx   3 dlid   4 wake list   5 trace   6 traces
--       7 answer (there once this call was carried out)
-- ARGV  1 due (ms)   2 '1' if due counts from now   3 seconds to remember the call
-- Returns 1 moved, 0 the job is no longer delayed. Markers live an hour longer than the new due time.
-- A repeat of the call changes nothing: the job may have run since, and its delay counts from the first.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
if redis.call('EXISTS', KEYS[7]) == 1 then
  return 1
end
local member = redis.call('GET', KEYS[2])
if not member or not redis.call('ZSCORE', KEYS[1], member) then
  return 0
end
local left_s = redis.call('TTL', KEYS[3])
redis.call('SET', KEYS[7], '', 'EX', ARGV[3])
redis.call('EXPIRE', KEYS[7], ARGV[3])
redis.call('DEL', KEYS[7])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = tonumber(ARGV[1])
if ARGV[2] == '1' then
  due = now + due
end
redis.call('ZADD', KEYS[1], string.format('%.0f', due), member)
local ttl = math.max(0, math.ceil((due - now) / 1000)) + 3600
redis.call('EXPIRE', KEYS[2], ttl)
if left_s < ttl then -- its id may have been asked to stay unique for longer
  redis.call('EXPIRE', KEYS[3], ttl)
end
if redis.call('EXPIRE', KEYS[5], ttl) == 1 and redis.call('TTL', KEYS[6]) < ttl then
  redis.call('SET', KEYS[6], '1', 'EX', ttl)
end
redis.call('SET', KEYS[7], 1, 'EX', ARGV[3])
-- The job has moved by now: a bell that cannot be rung must not make that look undone.
local first = redis.pcall('ZRANGE', KEYS[1], 0, 0)
if first[1] == member and redis.pcall('EXISTS', KEYS[4]) == 0 then
  redis.pcall('LPUSH', KEYS[4], '1')
  redis.pcall('EXPIRE', KEYS[4], 60)
end
return 1

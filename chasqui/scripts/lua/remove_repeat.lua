-- remove_repeat: forget a repeat spec.
-- KEYS  1 repeat set   2 spec hash   3 answer (what the first arrival of this call answered)
-- ARGV  1 spec key   2 seconds to remember the answer
-- Returns 1 removed, 0 there was none.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return 1
end
redis.call('DEL', KEYS[3])
redis.call('SET', KEYS[3], '', 'EX', ARGV[2])
redis.call('DEL', KEYS[3])
local removed = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
if removed == 1 then
  redis.call('SET', KEYS[3], 1, 'EX', ARGV[2])
end
return removed

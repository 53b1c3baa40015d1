-- upsert_repeat: write a repeat spec and its next fire time.
-- KEYS  1 repeat set   2 spec hash   3 answer (there once this call was carried out)
-- ARGV  1 next fire (ms)   2 spec key   3 spec   4 our own options for each fire, or ''
--       5 seconds to remember the call
-- Returns 1. The count of fires so far is kept, as chasquimq keeps it. A repeat of the call changes
-- nothing: the spec may have fired since, and must not be put back.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
if redis.call('EXISTS', KEYS[3]) == 1 then
  return 1
end
redis.call('SET', KEYS[3], '', 'EX', ARGV[5])
redis.call('DEL', KEYS[3])
redis.call('ZADD', KEYS[1], 'XX', 0, '')
redis.call('HDEL', KEYS[2], '')
redis.call('HSET', KEYS[2], 'spec', ARGV[3])
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], 'retry')
else
  redis.call('HSET', KEYS[2], 'retry', ARGV[4])
end
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[3], 1, 'EX', ARGV[5])
return 1

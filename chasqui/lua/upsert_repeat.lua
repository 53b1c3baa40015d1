-- upsert_repeat: write a repeat spec and its next fire time.
-- KEYS  1 repeat set   2 spec hash
-- ARGV  1 next fire (ms)   2 spec key   3 spec   4 our own options for each fire, or ''
-- Returns 1. The count of fires so far is kept, as chasquimq keeps it.
redis.call('HSET', KEYS[2], 'spec', ARGV[3])
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], 'retry')
else
  redis.call('HSET', KEYS[2], 'retry', ARGV[4])
end
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
return 1

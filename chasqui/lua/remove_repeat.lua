-- remove_repeat: forget a repeat spec.
-- KEYS  1 repeat set   2 spec hash
-- ARGV  1 spec key
-- Returns 1 removed, 0 there was none.
local removed = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return removed

-- release: hand entries back that were delivered and not started, as if they never had been.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   3 most entries   then the ids that it keeps
-- Returns how many were handed back. They get an idle time beyond any lease, so that the next reader
-- takes them at once, and their delivery does not count.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
local kept = {}
for i = 4, #ARGV do
  kept[ARGV[i]] = true
end
local released = 0
for _, held in ipairs(redis.call('XPENDING', key, group, '-', '+', ARGV[3], owner)) do
  if not kept[held[1]] then
    redis.call('XCLAIM', key, group, owner, 0, held[1], 'IDLE', 864000000,
               'RETRYCOUNT', math.max(0, held[4] - 1), 'FORCE', 'JUSTID')
    released = released + 1
  end
end
return released

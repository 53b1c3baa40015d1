-- release: hand entries back that were delivered and not started, as if they never had been.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   3 '1' if others read with CLAIM, or ''   4 how many ids follow that it
--       had in hand and lets go   then those, then the ids that it keeps
-- Returns how many were handed back: all that is the consumer's and not kept, and orphans that it lets
-- go. They get an idle time beyond any lease, so that the next reader takes them at once, and their
-- delivery does not count. Only a new entry wakes a read that waits with CLAIM: so one is added and deleted
-- at once, and nobody sees it. Without CLAIM none is added, for the server counts it: a group's lag is then
-- unknown, or 1 too many, until more is read.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
local beyond = 864000000
local kept, first_kept = {}, 5 + ARGV[4]
for i = first_kept, #ARGV do
  kept[ARGV[i]] = true
end
local released, from = 0, '-'
for i = 5, first_kept - 1 do
  local id = ARGV[i]
  if not kept[id] and #redis.call('XPENDING', key, group, id, id, 1) == 0 and is_orphan(key, group, id) then
    redis.call('XCLAIM', key, group, owner, 0, id, 'IDLE', beyond, 'RETRYCOUNT', 0, 'FORCE', 'JUSTID')
    released = released + 1
  end
end
while true do
  local page = redis.call('XPENDING', key, group, from, '+', 1000, owner)
  for _, held in ipairs(page) do
    if not kept[held[1]] and held[3] < beyond then
      redis.call('XCLAIM', key, group, owner, 0, held[1], 'IDLE', beyond,
                 'RETRYCOUNT', math.max(0, held[4] - 1), 'JUSTID')
      released = released + 1
    end
  end
  if #page < 1000 then
    break
  end
  from = '(' .. page[#page][1]
end
if released > 0 and ARGV[3] == '1' then
  local id = redis.pcall('XADD', key, '*', 'd', '')
  if type(id) == 'string' then
    redis.call('XDEL', key, id)
  end
end
return released

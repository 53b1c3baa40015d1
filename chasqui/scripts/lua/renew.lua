-- renew: a consumer still works on these entries: their idle time starts anew.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   then the ids
-- Returns the ids that are not the consumer's any more. Deliveries are not counted. What was handed
-- back meanwhile, as its idle time says, stays free for others. Without the group nothing is anybody's.
-- An orphan becomes the consumer's again.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
local beyond = 864000000
local lost = {}
for i = 3, #ARGV do
  local found = redis.pcall('XPENDING', key, group, ARGV[i], ARGV[i], 1)
  if found.err and not string.find(found.err, 'NOGROUP') then
    return found
  end
  local held = found[1]
  if not held and not found.err and is_orphan(key, group, ARGV[i]) then
    redis.call('XCLAIM', key, group, owner, 0, ARGV[i], 'FORCE', 'JUSTID')
  elseif not held or held[2] ~= owner then
    lost[#lost + 1] = ARGV[i]
  elseif held[3] < beyond then
    redis.call('XCLAIM', key, group, owner, 0, ARGV[i], 'JUSTID')
  end
end
return lost

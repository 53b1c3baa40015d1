-- renew: a consumer still works on these entries: their idle time starts anew.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   then the ids
-- Returns the ids that are not the consumer's any more. Deliveries are not counted.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV do
  local held = redis.call('XPENDING', key, group, ARGV[i], ARGV[i], 1)[1]
  if held and held[2] == owner then
    redis.call('XCLAIM', key, group, owner, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost

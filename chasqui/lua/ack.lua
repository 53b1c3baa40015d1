-- ack: entries are done: acknowledge and delete them.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer that must still own them, or '' where that is certain   then the ids
-- Returns how many were acknowledged if no owner was given, else per id '1' done, '0' not ours any more.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
if owner == '' then
  local acked = 0
  for first = 3, #ARGV, 1000 do
    local last = math.min(first + 999, #ARGV)
    acked = acked + redis.call('XACK', key, group, unpack(ARGV, first, last))
    redis.call('XDEL', key, unpack(ARGV, first, last))
  end
  return acked
end
local answers = {}
for i = 3, #ARGV do
  local held = redis.call('XPENDING', key, group, ARGV[i], ARGV[i], 1)[1]
  if held and held[2] == owner then
    redis.call('XACK', key, group, ARGV[i])
    redis.call('XDEL', key, ARGV[i])
    answers[#answers + 1] = '1'
  else
    answers[#answers + 1] = '0'
  end
end
return table.concat(answers)

-- ack: entries are done: acknowledge and delete them.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer that must still own them, or '' where that is certain   then the ids
-- Returns how many were acknowledged if no owner was given, else per id '1' done, '0' not ours any more.
-- What has not been delivered stays: a server that lost its tail may give an id to another job.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
if owner == '' then
  local acked = 0
  for first = 3, #ARGV, 1000 do
    local last = math.min(first + 999, #ARGV)
    local count = redis.call('XACK', key, group, unpack(ARGV, first, last))
    if count == last - first + 1 then
      redis.call('XDEL', key, unpack(ARGV, first, last))
    else
      for i = first, last do
        if is_orphan(key, group, ARGV[i]) then
          redis.call('XDEL', key, ARGV[i])
        end
      end
    end
    acked = acked + count
  end
  return acked
end
local answers = {}
for i = 3, #ARGV do
  if owns(key, group, owner, ARGV[i]) then
    redis.call('XACK', key, group, ARGV[i])
    redis.call('XDEL', key, ARGV[i])
    answers[#answers + 1] = '1'
  else
    answers[#answers + 1] = '0'
  end
end
return table.concat(answers)

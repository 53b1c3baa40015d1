-- ack: entries are done and certainly ours: acknowledge and delete them.
-- KEYS  1 stream
-- ARGV  1 group   then the ids
-- Returns how many were acknowledged.
-- What has not been delivered stays: a server that lost its tail may give an id to another job.
local key, group = KEYS[1], ARGV[1]
local acked = 0
for first = 2, #ARGV, 1000 do
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

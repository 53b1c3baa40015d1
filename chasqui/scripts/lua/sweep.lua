-- sweep: delete consumers that hold nothing and were silent for long, of every group of the stream.
-- KEYS  1 stream   2 paused
-- ARGV  1 ms of silence   2 most consumers to delete
-- Returns how many were deleted. One that lives after all is a consumer again with its next read. While a
-- queue is paused nobody reads, so silence tells nothing.
local key, silence, most = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('EXISTS', key) == 0 then
  return 0
end
local function facts(reply)
  local found = {}
  for i = 1, #reply, 2 do
    found[reply[i]] = reply[i + 1]
  end
  return found
end
local deleted = 0
for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local name = facts(group)['name']
  for _, reply in ipairs(redis.call('XINFO', 'CONSUMERS', key, name)) do
    local consumer = facts(reply)
    if deleted < most and consumer['pending'] == 0 and consumer['idle'] >= silence then
      redis.call('XGROUP', 'DELCONSUMER', key, name, consumer['name'])
      deleted = deleted + 1
    end
  end
end
return deleted

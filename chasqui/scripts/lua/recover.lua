-- recover: find entries that are a consumer's by the server's account and not in its hands.
-- KEYS  1 stream
-- ARGV  1 group   2 consumer   3 '1' if whoever had them died, so that this is one more delivery, or ''
--       if only a reply was lost   4 most entries   then the ids that it has in hand
-- Returns entries as {id, fields, idle ms, deliveries before this one}. An entry that was deleted while
-- pending comes as {id, nil}: it is acknowledged here, for it can never run.
-- Idle times go on, so that others get what somebody asks for and never receives; but for what was
-- handed back, which others must not take as well.
local beyond = 864000000
local key, group, owner, most = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local kept = {}
for i = 5, #ARGV do
  kept[ARGV[i]] = true
end
local found, from = {}, '-'
while true do
  local page = redis.call('XPENDING', key, group, from, '+', 1000, owner)
  for _, held in ipairs(page) do
    local id = held[1]
    if not kept[id] then
      -- One that was handed back counts as never delivered: taking it again is its first delivery.
      local count = ARGV[3] == '1' and held[4] + 1 or math.max(held[4], 1)
      local idle = held[3] < beyond and held[3] or 0
      local entry = redis.call('XCLAIM', key, group, owner, 0, id, 'IDLE', idle, 'RETRYCOUNT', count)[1]
      if entry and entry[2] then
        found[#found + 1] = {id, entry[2], held[3], count - 1}
      else
        redis.call('XACK', key, group, id)
        found[#found + 1] = {id, false}
      end
      if #found >= most then
        return found
      end
    end
  end
  if #page < 1000 then
    return found
  end
  from = '(' .. page[#page][1]
end

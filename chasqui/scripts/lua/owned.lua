-- owned: functions that say whose entry it is, for scripts about entries in a consumer's hands.
-- An orphan was delivered, is in the stream, and is pending for nobody: its consumer was deleted, or somebody
-- acknowledged it without deleting it. The worker that has it in hand may finish it, for nobody else ever
-- would. A user without the rights to look finds no orphans.
local function is_orphan(key, group, id)
  if #redis.pcall('XRANGE', key, id, id, 'COUNT', 1) == 0 then
    return false
  end
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  for _, pairs_of in ipairs(redis.pcall('XINFO', 'GROUPS', key)) do
    local facts = {}
    for i = 1, #pairs_of, 2 do
      facts[pairs_of[i]] = pairs_of[i + 1]
    end
    if facts['name'] == group then
      local last_ms, last_seq = string.match(facts['last-delivered-id'], '(%d+)-(%d+)')
      ms, seq, last_ms, last_seq = tonumber(ms), tonumber(seq), tonumber(last_ms), tonumber(last_seq)
      return ms < last_ms or ms == last_ms and seq <= last_seq
    end
  end
  return false
end

local function owns(key, group, owner, id)
  local held = redis.call('XPENDING', key, group, id, id, 1)[1]
  if held then
    return held[2] == owner
  end
  return is_orphan(key, group, id)
end


-- drain: delete jobs that wait in the stream, and free their ids.
-- KEYS  1 stream   then per entry: unique, dlid, the markers that keep its id from being added again
-- ARGV  per entry: its id
-- Returns per entry '1' deleted, '0' it was gone, or handed to a worker: what runs is left alone.
local function order(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end
local last_ms, last_number = -1, 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    for i = 1, #group, 2 do
      if group[i] == 'last-delivered-id' then
        local ms, number = order(group[i + 1])
        if ms > last_ms or (ms == last_ms and number > last_number) then
          last_ms, last_number = ms, number
        end
      end
    end
  end
end
local answers = {}
for i, id in ipairs(ARGV) do
  local ms, number = order(id)
  local waits = ms > last_ms or (ms == last_ms and number > last_number)
  if waits and redis.call('XDEL', KEYS[1], id) == 1 then
    redis.call('DEL', KEYS[2 * i], KEYS[2 * i + 1])
    answers[i] = '1'
  else
    answers[i] = '0'
  end
end
return table.concat(answers)

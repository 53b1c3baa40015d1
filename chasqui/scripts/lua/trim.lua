-- trim: drop the oldest entries of a stream that is a log (events, …), as the queue's settings and the
-- readers of the stream allow.
-- KEYS  1 the stream   2 config
-- ARGV  1 what config calls the stream: its fields are <name>_max_len and <name>_readers   2 entries to
--       keep where config does not say
-- Returns nothing of interest. The newest max_len entries always stay. While readers are alive, what the
-- slowest of them has not read stays as well, as long as there are no more entries in all than the largest
-- number that one of them may hold.
-- Whole nodes go (`~`), and about 10,000 entries at most by one call: the server serves nobody else
-- meanwhile. Needs no memory, so a full server can be trimmed.
local call, stream, settings = redis.call, KEYS[1],
  redis.call('HMGET', KEYS[2], ARGV[1] .. '_max_len', ARGV[1] .. '_readers')
-- What somebody wrote there that is no such number (nan, -5, 1e400) would fail every trim.
local keep = tonumber(string.match(settings[1] or '', '^%d+$') or ARGV[2])
keep = keep <= 1e15 and keep or tonumber(ARGV[2])
local hold, floor, floor_ms, floor_number = keep, nil, nil, nil
if settings[2] then
  local time = call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for until_ms, most, ms, number in string.gmatch(settings[2], '(%d+) (%d+) (%d+)-(%d+) [^\n]*') do
    if tonumber(until_ms) > now then
      hold = math.max(hold, tonumber(most))
      local order_ms, order = tonumber(ms), tonumber(number)
      if not floor or order_ms < floor_ms or (order_ms == floor_ms and order < floor_number) then
        floor, floor_ms, floor_number = ms .. '-' .. number, order_ms, order
      end
    end
  end
end
call('XTRIM', stream, 'MAXLEN', '~', string.format('%.0f', hold))
if floor then
  local most = math.min(call('XLEN', stream) - keep, 10000)
  if most > 0 then
    call('XTRIM', stream, 'MINID', '~', floor, 'LIMIT', most)
  end
end

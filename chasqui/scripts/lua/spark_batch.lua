-- spark_batch: take new jobs for a batch of a consuming query, or acknowledge and delete what the batch
-- holds; either with the lifecycle event that a worker would write for each.
-- KEYS  1 stream   2 events   3 paused   4 which driver took the query's name last
-- ARGV  1 group   2 consumer   3 most jobs   4 'active' to take, 'completed' to acknowledge
--       5 '1' to write events, '0' to write none   6 microseconds that the batch took, or '' if not known
--       7 the driver that asks
-- Returns how many jobs, or -1 if another driver has taken the name since, even if that one has ended: what
-- came late from this one would be acknowledged unread with a batch of that one. None are taken while the
-- queue is paused. The jobs do not move to the driver.
-- A batch is delivered once, when it is taken: acknowledging it is no delivery. Its consumer goes when it holds
-- nothing, in the same step: with one that holds jobs the server would forget them.
-- Events are best effort: one that cannot be written changes nothing.
local stream, group, consumer, event = KEYS[1], ARGV[1], ARGV[2], ARGV[4]
local takes = event == 'active'
local driver = redis.call('GET', KEYS[4])
if driver and driver ~= ARGV[7] then
  return -1
end
if takes and redis.call('EXISTS', KEYS[3]) == 1 then
  return 0
end
local entries, count = {}, 0
if takes then
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', ARGV[3], 'STREAMS', stream, '>')
  entries = reply and reply[1] and reply[1][2] or {}
  count = #entries
else
  local ids = {}
  for i, held in ipairs(redis.call('XPENDING', stream, group, '-', '+', ARGV[3], consumer)) do
    ids[i] = held[1]
    -- What somebody deleted while it was pending has no entry: it is acknowledged all the same.
    entries[#entries + 1] = ARGV[5] == '1' and redis.call('XRANGE', stream, held[1], held[1])[1] or nil
  end
  count = #ids
  if count > 0 then
    redis.call('XACK', stream, group, unpack(ids))
    redis.call('XDEL', stream, unpack(ids))
  else
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
  end
end
if ARGV[5] == '0' then
  return count
end

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
for _, entry in ipairs(entries) do
  local envelope, name
  for i = 1, entry[2] and #entry[2] or 0, 2 do
    if entry[2][i] == 'd' then
      envelope = entry[2][i + 1]
    elseif entry[2][i] == 'n' then
      name = entry[2][i + 1]
    end
  end
  local id, attempt, created = read(envelope or '')
  if id then
    local words = {'XADD', KEYS[2], '*', 'e', event, 'id', id, 'ts', now}
    if name and name ~= '' then
      words[#words + 1], words[#words + 2] = 'n', name
    end
    words[#words + 1], words[#words + 2] = 'attempt', string.format('%.0f', attempt + 1)
    if not takes and ARGV[6] ~= '' then
      words[#words + 1], words[#words + 2] = 'duration_us', ARGV[6]
    end
    if created then
      words[#words + 1], words[#words + 2] = 'created', created
    end
    redis.pcall(unpack(words))
  end
end
return count

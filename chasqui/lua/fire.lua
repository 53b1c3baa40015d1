-- fire: a repeat spec is due: put its jobs into the queue and set its next time, in one step.
-- KEYS  1 stream   2 delayed set   3 repeat set   4 spec hash   5 wake list
-- ARGV  1 spec key   2 score that the fires were computed from (ms)   3 next score, or '' if the spec
--       is finished   4 most entries to keep in the stream, or ''   5 name
--       then per fire: moment (ms), envelope
-- Returns how many were fired, or -1 if the spec is not due at that score any more: then another
-- scheduler has fired it, or it was written anew, and nothing is done. So a call that is repeated,
-- or was held up while others went on, does no harm.
-- A fire whose moment has not come by Redis's clock waits in the delayed set.
-- Before anything is changed, each command is used once to no effect: were one denied only then, the
-- spec would fire again and again.
local score = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not score or math.floor(tonumber(score)) ~= tonumber(ARGV[2]) then
  return -1
end
local stream, keep, name = KEYS[1], ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[3], 'XX', 0, '')
local waits, is_due = false, false
for i = 6, #ARGV, 2 do
  if tonumber(ARGV[i]) > now then
    waits = true
  else
    is_due = true
  end
end
if waits then
  redis.call('ZADD', KEYS[2], 'XX', 0, '')
end
if is_due then
  local denied = redis.pcall('XADD', stream, '0-0', 'd', '')
  if not string.find(denied.err, 'greater than 0-0', 1, true) then
    return denied
  end
end
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[3], '')
else
  redis.call('HINCRBY', KEYS[4], 'fired', 0)
end
local fires = 0
for i = 6, #ARGV, 2 do
  if tonumber(ARGV[i]) > now then
    redis.call('ZADD', KEYS[2], ARGV[i], struct.pack('<I4', #name) .. name .. ARGV[i + 1])
    if redis.pcall('EXISTS', KEYS[5]) == 0 then
      redis.pcall('LPUSH', KEYS[5], '1')
      redis.pcall('EXPIRE', KEYS[5], 60)
    end
  else
    local fields = {stream, '*', 'd', ARGV[i + 1]}
    if keep ~= '' then
      fields = {stream, 'MAXLEN', '~', keep, '*', 'd', ARGV[i + 1]}
    end
    if name ~= '' then
      fields[#fields + 1] = 'n'
      fields[#fields + 1] = name
    end
    redis.call('XADD', unpack(fields))
  end
  fires = fires + 1
end
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.pcall('DEL', KEYS[4])
else
  redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
  if fires > 0 then
    redis.call('HINCRBY', KEYS[4], 'fired', fires)
  end
end
return fires

-- fire: repeat specs are due: put their jobs into the queue and set their next times, in one step.
-- KEYS  1 stream   2 delayed set   3 repeat set   4 wake list   then per spec: its hash
-- ARGV  1 most entries to keep in the stream, or ''
--       then per spec: spec key, score that the fires were computed from (ms), next score, or '' if the
--       spec is finished, name, number of fires, then per fire: moment (ms), envelope
-- Returns {now (ms), jobs fired, specs that are not due at that score any more}. Such a spec was fired
-- by another scheduler, or written anew, and nothing is done about it. So a call that is repeated, or
-- was held up while others went on, does no harm.
-- A fire whose moment has not come by Redis's clock waits in the delayed set.
-- Each spec is done with before the next one begins: where the server refuses a job, the specs before
-- it have fired, and it and those behind it are due as before.
-- Before anything is changed, each command is used once to no effect: were one denied only then, the
-- spec would fire again and again.
local call, argv, stream, delayed, specs, wake, keep =
  redis.call, ARGV, KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

call('ZADD', specs, 'XX', 0, '')
call('ZREM', specs, '')
local denied = redis.pcall('XADD', stream, '0-0', 'd', '')
if not string.find(denied.err, 'greater than 0-0', 1, true) then
  return denied
end
denied = redis.pcall('HINCRBY', KEYS[5], 'fired', '')
if not string.find(denied.err, 'not an integer', 1, true) then
  return denied
end

local function put(moment, name, envelope)
  if tonumber(moment) > now then
    call('ZADD', delayed, moment, struct.pack('<I4', #name) .. name .. envelope)
    if redis.pcall('EXISTS', wake) == 0 then
      redis.pcall('LPUSH', wake, '1')
      redis.pcall('EXPIRE', wake, 60)
    end
  elseif keep == '' then
    if name == '' then
      call('XADD', stream, '*', 'd', envelope)
    else
      call('XADD', stream, '*', 'd', envelope, 'n', name)
    end
  elseif name == '' then
    call('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', envelope)
  else
    call('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', envelope, 'n', name)
  end
end

local fires, stale = 0, 0
local i, spec = 2, 5
while i <= #argv do
  local key, next_score, name, count = argv[i], argv[i + 2], argv[i + 3], tonumber(argv[i + 4])
  local first, last = i + 5, i + 3 + 2 * count
  local score = call('ZSCORE', specs, key)
  if not score or math.floor(tonumber(score)) ~= tonumber(argv[i + 1]) then
    stale = stale + 1
  else
    if count > 0 and tonumber(argv[last]) > now then
      call('ZADD', delayed, 'XX', 0, '')
    end
    for fire = first, last, 2 do
      put(argv[fire], name, argv[fire + 1])
    end
    -- From here on these moments are not fired again, whatever becomes of the count.
    if next_score == '' then
      call('ZREM', specs, key)
      redis.pcall('DEL', KEYS[spec])
    else
      call('ZADD', specs, next_score, key)
      if count > 0 then
        redis.pcall('HINCRBY', KEYS[spec], 'fired', count)
      end
    end
    fires = fires + count
  end
  i, spec = last + 2, spec + 1
end
return {now, fires, stale}

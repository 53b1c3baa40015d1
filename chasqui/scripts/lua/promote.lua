-- promote: move due jobs from the delayed set to the stream, oldest first.
-- KEYS  1 delayed set (score: due, ms)   2 stream   3 dead-letter stream   4 traces (exists while
--       delayed jobs may have a trace, each under this key, a colon and the job's id)   5 what the
--       didx of each job begins with, before its id
-- ARGV  1 most jobs to move   2 most entries to keep in the stream, or ''
-- Returns {now (ms), jobs still delayed, ms that the first of them has been due, us until it is due
-- or -1 if there is none, its score, malformed members moved to the dead-letter stream, {number, created, …}
-- of those of the promoted jobs whose id does not tell when they were created, then per promoted job: id,
-- name}. Reads Redis's clock, so workers' clocks do not matter.
-- A promoted job's didx goes with it, in this step: the job may fail and be back in the delayed set,
-- with a new didx, before the promoter has its answer.
-- Copies are made before their originals go, so nothing is lost where one cannot be made; and none is
-- made where they may not go, or they would be made again and again.
-- A malformed member that the dead-letter stream does not take stays, and the jobs behind it are moved;
-- the refusal is the answer then.
local call, delayed, stream, dead, traces, didx, keep =
  redis.call, KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[2]
local are_traced = call('EXISTS', traces) == 1
local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

-- The id is the envelope's first element: [array header][str header][id]. '' if it is not there.
local function id_of(envelope)
  local _, kind, high, low = string.byte(envelope, 1, 4)
  if not kind then
    return ''
  elseif kind >= 160 and kind <= 191 then
    return string.sub(envelope, 3, kind - 158)
  elseif kind == 217 and high then
    return string.sub(envelope, 4, 3 + high)
  elseif kind == 218 and low then
    return string.sub(envelope, 5, 4 + high * 256 + low)
  end
  return ''
end

-- Puts a job into the stream; the server's answer.
local function add(envelope, name)
  if keep == '' then
    if name == '' then
      return redis.pcall('XADD', stream, '*', 'd', envelope)
    end
    return redis.pcall('XADD', stream, '*', 'd', envelope, 'n', name)
  elseif name == '' then
    return redis.pcall('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', envelope)
  end
  return redis.pcall('XADD', stream, 'MAXLEN', '~', keep, '*', 'd', envelope, 'n', name)
end

-- The same with the job's trace taken back into its entry, if it has one.
local function add_traced(id, envelope, name)
  local key = traces .. ':' .. id
  local trace = redis.pcall('GET', key)
  local parent, run_before = string.match(type(trace) == 'string' and trace or '', '^(%S+) ?(%S*)$')
  if not parent then
    return add(envelope, name)
  end
  local fields = {stream, '*', 'd', envelope}
  if keep ~= '' then
    fields = {stream, 'MAXLEN', '~', keep, '*', 'd', envelope}
  end
  if name ~= '' then
    fields[#fields + 1] = 'n'
    fields[#fields + 1] = name
  end
  fields[#fields + 1] = 'traceparent'
  fields[#fields + 1] = parent
  if run_before ~= '' then
    fields[#fields + 1] = 'run_before'
    fields[#fields + 1] = run_before
  end
  local reply = redis.pcall('XADD', unpack(fields))
  if type(reply) ~= 'table' then
    redis.pcall('DEL', key)
  end
  return reply
end

local answer = {now, 0, 0, -1, '', 0, {}}
local left, bytes, stay, refusal = tonumber(ARGV[1]), 0, 0, nil
local is_allowed = false
repeat
  -- Few at a time, and not for ever: jobs may be large, and the server serves nobody else meanwhile.
  local most = math.min(left, 32)
  local due = call('ZRANGEBYSCORE', delayed, '-inf', string.format('%.0f', now), 'LIMIT', stay,
                   most)
  local copied, indexes, is_refused = {}, {}, false
  if #due > 0 and not is_allowed then
    local denied = redis.pcall('XADD', stream, '0-0', 'd', '')
    if not string.find(denied.err, 'greater than 0-0', 1, true) then
      return denied
    end
    call('ZREM', delayed, '')
    call('ZRANGE', delayed, 0, 0)
    call('ZCARD', delayed)
    is_allowed = true
  end
  for _, member in ipairs(due) do
    local reply
    local a, b, c, d = string.byte(member, 1, 4)
    local start = d and 5 + a + b * 256 + c * 65536 + d * 16777216
    local is_malformed = not start or start > #member + 1
    if is_malformed then
      reply = redis.pcall('XADD', dead, '*', 'd', member, 'source_id', '0-0', 'reason', 'malformed',
                          'detail', 'delayed member is shorter than its own prefix')
      answer[6] = answer[6] + 1
    else
      local name, envelope = string.sub(member, 5, start - 1), string.sub(member, start)
      local id = id_of(envelope)
      reply = are_traced and add_traced(id, envelope, name) or add(envelope, name)
      answer[#answer + 1] = id
      answer[#answer + 1] = name
      if not is_ulid(id) then
        local _, _, created = read(envelope)
        if created then
          local told = answer[7]
          told[#told + 1], told[#told + 2] = (#answer - 9) / 2, created
        end
      end
    end
    if type(reply) ~= 'table' then
      copied[#copied + 1] = member
      indexes[#indexes + 1] = not is_malformed and didx .. answer[#answer - 1] or nil
      bytes = bytes + #member
    elseif is_malformed then
      stay, refusal = stay + 1, reply
    else
      is_refused, refusal = true, reply
      break
    end
  end
  if #copied > 0 then
    call('ZREM', delayed, unpack(copied))
    if #indexes > 0 then
      redis.pcall('DEL', unpack(indexes))
    end
  end
  left = left - #due
until is_refused or #due < most or left <= 0 or bytes > 4194304
if refusal then
  return refusal
end

local first = call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
if first[2] then
  local wait_us = tonumber(first[2]) * 1000 - now_us
  answer[2] = call('ZCARD', delayed)
  answer[3] = math.max(0, math.floor(-wait_us / 1000))
  answer[4] = math.min(math.max(0, math.ceil(wait_us)), 86400000000)
  answer[5] = first[2]
end
return answer

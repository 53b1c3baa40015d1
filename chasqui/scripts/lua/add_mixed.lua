-- add_mixed: put a chunk of jobs with options where each belongs, once however often it is sent.
-- KEYS  1 stream   2 delayed set   3 flags (what the chunk's first arrival answered)   4 wake list
--       if the jobs are traced: traces   then per delayed job: didx, and its trace if they are traced;
--       per unique job: unique, dlid, result
-- ARGV  1 seconds to remember the flags   2 most entries to keep in the stream, or ''
--       3 most jobs that may wait, or ''   4 seconds that the id of an immediate job stays unique
--       5 the same for a delayed job, if that is more than an hour past its due time
--       6 kinds: per job one digit, 1 delayed + 2 unique + 4 due counts from now
--       7 traceparent of all jobs, or ''   8 when they were created (ms)
--       then per job: envelope, name, due (ms; 0 if not delayed)
-- Returns per job '1' added or '0' an earlier job has its id, or {depth} if the queue is full.
-- A job that is new under an id of the caller's takes the place of an earlier one: what that one
-- returned is no answer to who waits for this one, and is deleted.
-- A job for a moment that has come, by the server's clock, goes straight into the stream.
-- A new earliest job rings the wake list, which the promoter sleeps on. The delayed set has no room
-- for a trace: there it lies under a key beside the job, and `traces` says that there are such keys.
-- Before anything is changed, each command is used once to no effect: one that is denied fails there.
local flags = redis.call('GET', KEYS[3])
if flags then
  redis.call('EXPIRE', KEYS[3], ARGV[1]) -- a write, so that a WAITAOF behind it waits for the add
  return flags
end
local stream, delayed, keep, kinds, trace = KEYS[1], KEYS[2], ARGV[2], ARGV[6], ARGV[7]
local jobs = #kinds
-- Asked before anything is written, as is the delayed set: a key of another type must fail here.
local depth = redis.call('XLEN', stream)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Of the job that takes an id: when it was created, and since when it is here. Ends before that are another's.
local taken = string.format('%s %.0f', ARGV[8], now)
local _, immediate = string.gsub(kinds, '[0246]', '')
local is_past = {}
for i = 1, jobs do
  local kind = string.byte(kinds, i) - 48
  if (kind == 1 or kind == 3) and tonumber(ARGV[3 * i + 8]) <= now then
    is_past[i], immediate = true, immediate + 1
  end
end
if ARGV[3] ~= '' and depth + immediate > tonumber(ARGV[3]) then
  return {depth}
end
local first = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
redis.call('SET', KEYS[3], '', 'EX', ARGV[1])
redis.call('DEL', KEYS[3])
redis.call('EXISTS', KEYS[3])
if immediate < jobs then
  redis.call('ZADD', delayed, 'XX', 0, '')
end
if immediate > 0 then
  local denied = redis.pcall('XADD', stream, '0-0', 'd', '')
  if not string.find(denied.err, 'greater than 0-0', 1, true) then
    return denied
  end
end
local earliest = tonumber(first[2])
local rings = false
local added = {}
local traced_s, left_s = 0, trace == '' and 0 or redis.call('TTL', KEYS[5])
local key = trace == '' and 5 or 6
for i = 1, jobs do
  local kind = string.byte(kinds, i) - 48
  local at = 3 * i + 6
  local envelope, name, due = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local is_delayed, is_unique = kind % 2 == 1, math.floor(kind / 2) % 2 == 1
  if kind >= 4 then
    due = now + due
  end
  local didx, kept_trace, unique, dlid, result
  if is_delayed then
    didx = KEYS[key]
    key = key + 1
    if trace ~= '' then
      kept_trace = KEYS[key]
      key = key + 1
    end
  end
  if is_unique then
    unique, dlid, result = KEYS[key], KEYS[key + 1], KEYS[key + 2]
    key = key + 3
  end
  is_delayed = is_delayed and not is_past[i]
  -- With the result in one question: of nearly all new ids there is nothing at all.
  local is_known = is_unique and redis.call('EXISTS', unique, dlid, result) > 0
  if is_known and redis.call('EXISTS', unique, dlid) > 0 then
    added[i] = '0'
  else
    added[i] = '1'
    if is_known then
      redis.call('DEL', result)
    end
    if is_delayed then
      local member = struct.pack('<I4', #name) .. name .. envelope
      local ttl = math.max(0, math.ceil((due - now) / 1000)) + 3600
      redis.call('ZADD', delayed, string.format('%.0f', due), member)
      redis.call('SET', didx, member, 'EX', ttl)
      if kept_trace then
        redis.call('SET', kept_trace, trace, 'EX', ttl)
        traced_s = math.max(traced_s, ttl)
      end
      if is_unique then
        redis.call('SET', dlid, taken, 'EX', math.max(ttl, tonumber(ARGV[5])))
      end
      if not earliest or due < earliest then
        earliest, rings = due, true
      end
    else
      local fields = {stream, '*', 'd', envelope}
      if keep ~= '' then
        fields = {stream, 'MAXLEN', '~', keep, '*', 'd', envelope}
      end
      if name ~= '' then
        fields[#fields + 1] = 'n'
        fields[#fields + 1] = name
      end
      if trace ~= '' then
        fields[#fields + 1] = 'traceparent'
        fields[#fields + 1] = trace
      end
      redis.call('XADD', unpack(fields))
      if is_unique then
        redis.call('SET', unique, taken, 'EX', ARGV[4])
      end
    end
  end
end
if traced_s > 0 and left_s < traced_s then
  redis.call('SET', KEYS[5], '1', 'EX', traced_s)
end
-- The jobs are in by now: a bell that cannot be rung must not make that look undone.
if rings and redis.pcall('EXISTS', KEYS[4]) == 0 then
  redis.pcall('LPUSH', KEYS[4], '1')
  redis.pcall('EXPIRE', KEYS[4], 60)
end
flags = table.concat(added)
redis.call('SET', KEYS[3], flags, 'EX', ARGV[1])
return flags

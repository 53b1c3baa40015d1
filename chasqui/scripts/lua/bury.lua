-- bury: jobs that will not run again leave the stream for the dead-letter stream.
-- KEYS  1 stream   2 dead-letter stream
-- ARGV  1 group   2 consumer that must still own them   3 most entries to keep there, or ''
--       4 the events stream, or '' if nothing is told   5 per job the fields of its event, as msgpack
--       6 the history stream, or '' if none is kept   7 per job the fields of its entry there, as msgpack
--       then per job: entry id, number of values that follow, 'd', envelope, field, value, …
-- Returns per job '1' moved, '0' not ours any more. The copy is made before the original goes: if it
-- cannot be made, the script ends there and the entry stays pending. So it does if it may not go: each
-- command is used once to no effect before the first copy is made. The event for those
-- who wait for a job is written in the same step. The events stream is not among the keys: a user who may not
-- write it still moves jobs.
local key, dead, group, owner, keep = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local history = ARGV[6]
for _, copies in ipairs(history == '' and {dead} or {dead, history}) do
  local denied = redis.pcall('XADD', copies, '0-0', 'd', '')
  if not string.find(denied.err, 'greater than 0-0', 1, true) then
    return denied
  end
end
if history ~= '' then
  redis.call('XLEN', history) -- another kind of key would be noticed only after the first copy
end
redis.call('XACK', key, group, '0-0')
redis.call('XDEL', key, '0-0')
local told = ARGV[4] ~= '' and cmsgpack.unpack(ARGV[5])
local kept = history ~= '' and cmsgpack.unpack(ARGV[7])
local answers = {}
local i = 8
while i <= #ARGV do
  local id, count = ARGV[i], tonumber(ARGV[i + 1])
  if owns(key, group, owner, id) then
    if keep == '' then
      redis.call('XADD', dead, '*', unpack(ARGV, i + 2, i + 1 + count))
    else
      redis.call('XADD', dead, 'MAXLEN', '~', keep, '*', unpack(ARGV, i + 2, i + 1 + count))
    end
    if kept then
      local fields = kept[#answers + 1]
      fields[#fields + 1], fields[#fields + 2] = 'd', ARGV[i + 3]
      redis.call('XADD', history, '*', unpack(fields))
    end
    redis.call('XACK', key, group, id)
    redis.call('XDEL', key, id)
    answers[#answers + 1] = '1'
    if told then
      redis.pcall('XADD', ARGV[4], '*', unpack(told[#answers]))
    end
  else
    answers[#answers + 1] = '0'
  end
  i = i + 2 + count
end
return table.concat(answers)

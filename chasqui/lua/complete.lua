-- complete: jobs are done, if they are still ours: acknowledge them, store what they returned and write
-- their events, in one step.
-- KEYS  1 stream   then per job: result; or nothing more if none of them returned anything
-- ARGV  1 group   2 consumer that must still own them   3 ms to keep results
--       4 the events stream, or '' if nothing is told   then per job: entry id, encoded result (or ''),
--       and if it is told: job id, ts, name, attempt, duration_us
-- Returns per job '1' done, '2' done but the result could not be stored, '0' not ours any more: then
-- nothing was stored and nobody told.
-- The acknowledgement comes first. A script's first write is refused when memory is short, unless it
-- frees some: so a queue drains even then, and the result, as a later write, is still stored.
-- The events stream is not among the keys: a user who may not write it still acknowledges.
local call, argv, key, group, owner, events = redis.call, ARGV, KEYS[1], ARGV[1], ARGV[2], ARGV[4]
local step = events == '' and 2 or 7
local answers = {}
for i = 5, #argv, step do
  local id, answer = argv[i], '0'
  local result = KEYS[#answers + 2]
  if owns(key, group, owner, id) then
    answer = '1'
    call('XACK', key, group, id)
    call('XDEL', key, id)
    if result and redis.pcall('SET', result, argv[i + 1], 'PX', argv[3]).err then
      answer = '2'
    end
    if step == 7 then
      local job, ts, name, attempt, took = unpack(argv, i + 2, i + 6)
      if name == '' then
        redis.pcall('XADD', events, '*', 'e', 'completed', 'id', job, 'ts', ts, 'attempt', attempt,
          'duration_us', took)
      else
        redis.pcall('XADD', events, '*', 'e', 'completed', 'id', job, 'ts', ts, 'n', name, 'attempt', attempt,
          'duration_us', took)
      end
    end
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)

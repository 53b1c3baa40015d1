-- complete: jobs are done, if they are still ours: acknowledge them, store what they returned and write
-- their events, in one step.
-- KEYS  1 stream   then per job: result; or nothing more if none of them returned anything
-- ARGV  1 group   2 consumer that must still own them   3 ms to keep results
--       4 the events stream, or '' if nothing is told   5 the history stream, or '' if none is kept
--       then per job: entry id, encoded result (or ''), and if it is told or kept: job id, ts, name,
--       attempt, duration_us, created (or '' if its id tells that); and if it is kept: envelope
-- Returns per job '1' done, '2' done but the result could not be stored, '0' not ours any more: then
-- nothing was stored and nobody told.
-- The acknowledgement comes before results and events. A script's first write is refused when memory is
-- short, unless it frees some: so a queue drains even then, and the result, as a later write, is still
-- stored. The copy for the history is made before the original goes: if it cannot be made, the script ends
-- there and the entry stays pending. So it does if it may not go: then each command is used once to no
-- effect before the first copy is made, which also lets a queue drain whose memory is short.
-- The events stream is not among the keys: a user who may not write it still acknowledges.
local call, argv, key, group, owner, events, history =
  redis.call, ARGV, KEYS[1], ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local is_told, is_kept = events ~= '', history ~= ''
local step = is_kept and 9 or is_told and 8 or 2
if is_kept then
  call('XACK', key, group, '0-0')
  call('XDEL', key, '0-0')
end
local answers = {}
for i = 6, #argv, step do
  local id, answer = argv[i], '0'
  local result = KEYS[#answers + 2]
  if owns(key, group, owner, id) then
    answer = '1'
    local job, ts, name, attempt, took, created, envelope = unpack(argv, i + 2, i + step - 1)
    if is_kept then
      if name == '' then
        call('XADD', history, '*', 'e', 'completed', 'id', job, 'ts', ts, 'attempt', attempt,
          'duration_us', took, 'd', envelope)
      else
        call('XADD', history, '*', 'e', 'completed', 'id', job, 'ts', ts, 'n', name, 'attempt', attempt,
          'duration_us', took, 'd', envelope)
      end
    end
    call('XACK', key, group, id)
    call('XDEL', key, id)
    if result and redis.pcall('SET', result, argv[i + 1], 'PX', argv[3]).err then
      answer = '2'
    end
    if is_told then
      if created ~= '' then
        local words = {'XADD', events, '*', 'e', 'completed', 'id', job, 'ts', ts, 'n', name, 'attempt', attempt,
          'duration_us', took, 'created', created}
        if name == '' then
          table.remove(words, 10)
          table.remove(words, 10)
        end
        redis.pcall(unpack(words))
      elseif name == '' then
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

-- complete: jobs are done and returned something: store that and acknowledge them, in one step.
-- KEYS  1 stream   then per job: result
-- ARGV  1 group   2 consumer that must still own them   3 ms to keep results
--       then per job: entry id, encoded result
-- Returns per job '1' done, '2' done but the result could not be stored, '0' not ours any more: then
-- nothing was stored.
-- The acknowledgement comes first. A script's first write is refused when memory is short, unless it
-- frees some: so a queue drains even then, and the result, as a later write, is still stored.
local key, group, owner = KEYS[1], ARGV[1], ARGV[2]
local answers = {}
for i = 4, #ARGV, 2 do
  if owns(key, group, owner, ARGV[i]) then
    redis.call('XACK', key, group, ARGV[i])
    redis.call('XDEL', key, ARGV[i])
    local stored = redis.pcall('SET', KEYS[i / 2], ARGV[i + 1], 'PX', ARGV[3])
    answers[#answers + 1] = stored.err and '2' or '1'
  else
    answers[#answers + 1] = '0'
  end
end
return table.concat(answers)

-- flow_step: steps of flows are done, if they are still ours: acknowledge them, store what they returned, write
-- their events, and move their flows on, in one step.
-- KEYS  1 stream   2 dead-letter stream   then per job: result, flow, the flow's results
-- ARGV  1 group   2 consumer that must still own them   3 ms to keep results
--       4 the events stream, or '' if nothing is told   5 the history stream, or '' if none is kept
--       6 most entries to keep in the dead-letter stream, or ''   7 seconds to keep a flow
--       8 most bytes of an envelope   then per job: entry id, job id, chain, step, encoded result,
--       1 if the result is stored whatever comes next, ts, name, attempt, duration_us, created (or '' if its id
--       tells that), envelope (or '' if no history is kept)
-- Returns per job '1' done, '2' done but the result could not be stored, '0' not ours any more: then nothing was
-- changed; '3' done and its flow is gone, '4' done and a job of its flow went to the dead-letter stream.
-- The flow moves before the entry goes: if something is refused, the script ends there and the entry stays pending.
local call, argv, key, group, owner = redis.call, ARGV, KEYS[1], ARGV[1], ARGV[2]
local events, history = argv[4], argv[5]
local scene = {stream = key, dead = KEYS[2], keep = argv[6], events = events, ttl = argv[7],
  most = tonumber(argv[8]), result_ttl = argv[3], kept = {}}
local denied = refusal(scene, group)
if denied then
  return denied
end
local answers = {}
for i = 9, #argv, 12 do
  local id, job, chain, step, value, is_stored = unpack(argv, i, i + 5)
  local ts, name, attempt, took, created, envelope = unpack(argv, i + 6, i + 11)
  local keys, answer = 3 * #answers + 3, '0'
  if owns(key, group, owner, id) then
    answer = '1'
    local flow, was, template = flow_of(scene, job, chain, step, KEYS[keys + 1], KEYS[keys + 2], id)
    if flow and flow.err then
      return flow
    end
    local told = {'e', 'completed', 'id', job, 'ts', ts, 'n', name, 'attempt', attempt, 'duration_us', took}
    if name == '' then
      table.remove(told, 7)
      table.remove(told, 7)
    end
    if history ~= '' then
      told[#told + 1], told[#told + 2] = 'd', envelope
      call('XADD', history, '*', unpack(told))
      told[#told], told[#told - 1] = nil, nil
    end
    if flow then
      step_ended(scene, flow, chain, tonumber(step), value, false, was, template)
    else
      answer = '3'
    end
    call('XACK', key, group, id)
    call('XDEL', key, id)
    if value ~= NIL and (is_stored == '1' or flow and flow.is_last)
      and redis.pcall('SET', KEYS[keys], value, 'PX', argv[3]).err then
      answer = '2'
    elseif flow and flow.died then
      answer = '4'
    end
    if events ~= '' then
      if created ~= '' then
        told[#told + 1], told[#told + 2] = 'created', created
      end
      redis.pcall('XADD', events, '*', unpack(told))
    end
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)

-- flow_bury: steps of flows that will not run again leave the stream for the dead-letter stream, and their flows
-- are told.
-- KEYS  1 stream   2 dead-letter stream   then per job: flow, the flow's results
-- ARGV  1 group   2 consumer that must still own them   3 ms to keep results   4 the events stream, or ''
--       5 the history stream, or ''   6 most entries to keep in the dead-letter stream, or ''
--       7 seconds to keep a flow   8 most bytes of an envelope   9 per job the fields of its event, as msgpack
--       10 per job the fields of its entry in the history, as msgpack
--       then per job: entry id, job id, chain, step, what stands for its result, number of values that follow,
--       'd', envelope, field, value, …
-- Returns per job '1' moved, '0' not ours any more, '3' moved and its flow is gone, '4' moved and another job of
-- its flow went to the dead-letter stream too. The copy is made before the original goes, as bury does.
local call, argv, key, group, owner = redis.call, ARGV, KEYS[1], ARGV[1], ARGV[2]
local events, history = argv[4], argv[5]
local scene = {stream = key, dead = KEYS[2], keep = argv[6], events = events, ttl = argv[7],
  most = tonumber(argv[8]), result_ttl = argv[3], kept = {}}
local denied = refusal(scene, group)
if denied then
  return denied
end
if history ~= '' then
  call('XLEN', history) -- another kind of key would be noticed only after the first copy
end
local told = events ~= '' and cmsgpack.unpack(argv[9])
local kept = history ~= '' and cmsgpack.unpack(argv[10])
local answers = {}
local i = 11
while i <= #argv do
  local id, job, chain, step, value, count = unpack(argv, i, i + 5)
  local keys, answer = 2 * #answers + 3, '0'
  if owns(key, group, owner, id) then
    answer = '1'
    local flow, was, template = flow_of(scene, job, chain, step, KEYS[keys], KEYS[keys + 1], id)
    if flow and flow.err then
      return flow
    end
    if kept then
      local fields = kept[#answers + 1]
      fields[#fields + 1], fields[#fields + 2] = 'd', argv[i + 7]
      call('XADD', history, '*', unpack(fields))
    end
    xadd(scene.dead, scene.keep, {unpack(argv, i + 6, i + 5 + count)})
    if told then
      redis.pcall('XADD', events, '*', unpack(told[#answers + 1]))
    end
    if flow then
      step_ended(scene, flow, chain, tonumber(step), value, true, was, template)
      answer = flow.died and '4' or '1'
    else
      answer = '3'
    end
    call('XACK', key, group, id)
    call('XDEL', key, id)
  end
  answers[#answers + 1] = answer
  i = i + 6 + count
end
return table.concat(answers)

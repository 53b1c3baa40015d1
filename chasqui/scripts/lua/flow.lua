-- flow: functions that move a flow on when one of its steps has ended, for scripts that end steps.
-- A flow is a hash: `total` chains, of which `left` have not ended and `failed` have failed; `need` (all, ended)
-- and `join` (1 if there is one); per step that has ended `e<chain>.<step>`: 1 done, x dead; per step to come
-- `n<chain>.<step>`, what its job is made of; `joined` once the join is added; `dead<chain>`, the entry in the
-- dead-letter stream that stands for the chain's last job while the chain cannot go on, of the chain behind the
-- join `deadj`. In a second hash lies what each chain returned.
-- `scene` is what all jobs of a call share: stream, dead, keep, events, ttl, most, result_ttl, and `kept`, the keys
-- that the call has given their time to live.
local NIL = '\192'
local settle_join, step_ended

local function clock(scene)
  if not scene.now then
    local time = redis.call('TIME')
    scene.now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return scene.now
end

local function keep(scene, key)
  if not scene.kept[key] then
    scene.kept[key] = true
    redis.call('EXPIRE', key, scene.ttl)
  end
end

-- The header of a msgpack value by its size, for the three widths of its kind.
local function header(size, narrow, wide, wider)
  if narrow and size < 256 then
    return string.char(narrow, size)
  elseif size < 65536 then
    return string.char(wide) .. struct.pack('>I2', size)
  end
  return string.char(wider) .. struct.pack('>I4', size)
end

-- The envelope and the name of a step to come. `value` is the result that becomes the last part of its payload.
local function job_of(template, value, created)
  local name, head, before = struct.unpack('<I4I4I4', template)
  local at = 13 + name + head
  local payload = string.sub(template, at, at + before - 1) .. value
  return string.sub(template, 13 + name, at - 1) .. header(#payload, 196, 197, 198) .. payload .. '\207'
    .. struct.pack('>I4I4', math.floor(created / 2 ^ 32), created % 2 ^ 32) .. '\0'
    .. string.sub(template, at + before), string.sub(template, 13, 12 + name)
end

local function xadd(key, keep, fields)
  if keep == '' then
    return redis.call('XADD', key, '*', unpack(fields))
  end
  return redis.call('XADD', key, 'MAXLEN', '~', keep, '*', unpack(fields))
end

-- Put a job that was not added into the dead-letter stream, and tell those who wait for it. `is_stand_in`: what it
-- would have run with is missing, so that it must not be replayed.
local function bury_unadded(scene, flow, chain, step, envelope, name, reason, detail, is_stand_in)
  local now, job = string.format('%.0f', clock(scene)), flow.prefix .. chain .. '.' .. step
  local fields = {'d', envelope}
  local told = {'e', 'dlq', 'id', job, 'ts', now}
  if name ~= '' then
    fields[3], fields[4] = 'n', name
    told[7], told[8] = 'n', name
  end
  for _, word in ipairs({'source_id', flow.source, 'reason', reason, 'detail', detail, 'attempts', '0',
    'failed_at', now}) do
    fields[#fields + 1] = word
  end
  if is_stand_in then
    fields[#fields + 1] = 'flow'
    fields[#fields + 1] = string.sub(flow.prefix, 2, -2)
  end
  local id = xadd(scene.dead, scene.keep, fields)
  if scene.events ~= '' then
    for _, word in ipairs({'attempt', '0', 'reason', reason, 'created', now}) do
      told[#told + 1] = word
    end
    redis.pcall('XADD', scene.events, '*', unpack(told))
  end
  flow.died = true
  return id
end

-- Whoever waits for the last job of a chain must hear that it will not run.
local function stand_in(scene, flow, chain, step, reason, detail)
  local last, template = step, nil
  repeat
    local found = redis.call('HGET', flow.key, 'n' .. chain .. '.' .. last)
    template, last = found or template, last + 1
  until not found
  local envelope, name = job_of(template, NIL, clock(scene))
  local id = bury_unadded(scene, flow, chain, last - 2, envelope, name, reason, detail, true)
  redis.call('HSET', flow.key, 'dead' .. chain, id)
end

local function withdraw(scene, flow, chain)
  local id = redis.call('HGET', flow.key, 'dead' .. chain)
  if id and id ~= '' then
    redis.call('XDEL', scene.dead, id)
    redis.call('HSET', flow.key, 'dead' .. chain, '')
  end
end

local function add_step(scene, flow, chain, step, template, value)
  local envelope, name = job_of(template, value, clock(scene))
  if #envelope > scene.most then
    local detail = 'with the result before it the job takes ' .. #envelope .. ' bytes'
    bury_unadded(scene, flow, chain, step, envelope, name, 'oversize_payload', detail, false)
    local failed = {id = flow.prefix .. chain .. '.' .. step, reason = 'oversize_payload', error = detail}
    local further = redis.call('HGET', flow.key, 'n' .. chain .. '.' .. (step + 1))
    step_ended(scene, flow, chain, step, cmsgpack.pack({['~failed'] = failed}), true, nil, further)
    return
  end
  local fields = {'d', envelope}
  if name ~= '' then
    fields[3], fields[4] = 'n', name
  end
  if flow.trace and flow.trace ~= '' then
    fields[#fields + 1] = 'traceparent'
    fields[#fields + 1] = flow.trace
  end
  redis.call('XADD', scene.stream, '*', unpack(fields))
end

-- All chains have ended: add the join, with what they returned in their order.
local function add_join(scene, flow)
  local total, size = flow.total, 0
  local parts = {total < 16 and string.char(144 + total) or header(total, nil, 220, 221)}
  local has_results = redis.call('EXISTS', flow.results) == 1
  if not has_results then
    parts[2] = string.rep(NIL, total)
  end
  for first = 0, has_results and total - 1 or -1, 1000 do
    local names = {}
    for i = first, math.min(first + 999, total - 1) do
      names[#names + 1] = i
    end
    for _, value in ipairs(redis.call('HMGET', flow.results, unpack(names))) do
      parts[#parts + 1] = value or NIL
      size = size + #parts[#parts]
    end
    if size > scene.most then
      break
    end
  end
  withdraw(scene, flow, 'j')
  redis.call('HSET', flow.key, 'joined', '1')
  flow.joined = '1'
  redis.call('EXPIRE', flow.results, math.ceil(scene.result_ttl / 1000)) -- the join has them from now on
  if size > scene.most then
    redis.call('HSET', flow.key, 'ej.0', 'x')
    stand_in(scene, flow, 'j', 0, 'oversize_payload', 'the results of the children take too many bytes')
    return
  end
  add_step(scene, flow, 'j', 0, redis.call('HGET', flow.key, 'nj.0'), table.concat(parts))
end

-- The dead letter of the join is there while all chains have ended and some of them have failed.
settle_join = function(scene, flow)
  local failed = flow.failed
  if flow.left > 0 then
    withdraw(scene, flow, 'j')
  elseif failed == 0 or flow.need == 'ended' then
    add_join(scene, flow)
  elseif (redis.call('HGET', flow.key, 'deadj') or '') == '' then
    local detail = string.format('%d of %d children failed; the last to fail was %s', failed, flow.total,
      redis.call('HGET', flow.key, 'why'))
    stand_in(scene, flow, 'j', 0, 'children_failed', detail)
  end
end

-- A step has ended: `value` is its result, or what stands for it if it failed. What it changes in the hash is
-- written before it is acknowledged, and the mark of the step keeps it from counting twice.
-- `was` is the mark that the step has, `template` what the step behind it is made of.
step_ended = function(scene, flow, chain, step, value, is_failed, was, template)
  local key, at, has_join = flow.key, chain .. '.' .. step, flow.join == '1'
  if was == '1' or was == 'x' and is_failed then
    return
  end
  local counts = chain ~= 'j' and not flow.joined
  local is_over = is_failed or not template
  if counts and has_join then
    local result = is_over and value or NIL
    if is_failed and flow.need == 'ended' or not is_failed and (was == 'x' or result ~= NIL) then
      redis.call('HSET', flow.results, chain, result)
      keep(scene, flow.results)
    end
  end
  if is_failed then
    redis.call('HSET', key, 'e' .. at, 'x', 'why', flow.prefix .. at)
  else
    redis.call('HSET', key, 'e' .. at, '1')
  end
  if counts then
    local lefts = is_over and (was == 'x' and 0 or -1) or (was == 'x' and 1 or 0)
    local fails = is_failed and 1 or was == 'x' and -1 or 0
    flow.left = lefts == 0 and flow.left or redis.call('HINCRBY', key, 'left', lefts)
    flow.failed = fails == 0 and flow.failed or redis.call('HINCRBY', key, 'failed', fails)
  end
  if chain == 'j' or not has_join then
    if was == 'x' then
      withdraw(scene, flow, chain)
    end
    if is_failed and template then
      stand_in(scene, flow, chain, step + 1, 'step_failed', flow.prefix .. at .. ' failed, which comes before it')
    end
    flow.is_last = not is_failed and not template
  end
  if template and not is_failed then
    add_step(scene, flow, chain, step + 1, template, value)
  end
  if counts and has_join and not flow.joined and (is_over or was == 'x') then
    settle_join(scene, flow)
  end
end

-- The flow that a job belongs to, the mark of its step, and what the step behind it is made of; nothing if the flow
-- is gone, or if another kind of value has its key. The commands that move it on are used to no effect first: one
-- that is denied fails here.
local function flow_of(scene, job, chain, step, key, results, source)
  local said = redis.pcall('HMGET', key, 'total', 'left', 'failed', 'need', 'join', 'joined', 'trace',
    'e' .. chain .. '.' .. step, 'n' .. chain .. '.' .. (step + 1))
  if said.err then
    if string.find(said.err, 'WRONGTYPE', 1, true) then
      return nil
    end
    return said
  end
  if not said[1] then
    return nil
  end
  if not scene.may_write then
    redis.call('HINCRBY', key, 'failed', 0)
    redis.call('HSET', key, 'total', said[1])
    redis.call('HGET', key, 'total')
    redis.call('EXISTS', key)
    clock(scene)
    scene.may_write = true
  end
  keep(scene, key)
  return {key = key, results = results, prefix = string.match(job, '^(.*~)[^~]*$'), source = source,
    total = tonumber(said[1]), left = tonumber(said[2]), failed = tonumber(said[3]), need = said[4],
    join = said[5], joined = said[6], trace = said[7]}, said[8], said[9]
end

-- Nothing if all that a flow needs may be done to the two streams, or else what the server says.
local function refusal(scene, group)
  redis.call('XACK', scene.stream, group, '0-0')
  redis.call('XDEL', scene.stream, '0-0')
  redis.call('XDEL', scene.dead, '0-0')
  for _, key in ipairs({scene.stream, scene.dead}) do
    local denied = redis.pcall('XADD', key, '0-0', 'd', '')
    if not string.find(denied.err, 'greater than 0-0', 1, true) then
      return denied
    end
  end
end


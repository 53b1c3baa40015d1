-- spark_stage: put aside a chunk of jobs that a Spark task wrote, until the driver publishes them.
-- KEYS  1 stage list (three elements per job: envelope, name, due)
-- ARGV  1 jobs that this task staged before   2 seconds until the list is dropped
--       then per job: envelope, name, due (ms; 0 for now)
-- Returns 1 staged, 0 it was there already (the chunk was sent twice), -1 what came before is gone.
local have, before, count = redis.call('LLEN', KEYS[1]) / 3, tonumber(ARGV[1]), (#ARGV - 2) / 3
if have >= before + count then
  return 0
end
if have ~= before then
  return -1
end
for first = 3, #ARGV, 1500 do
  redis.call('RPUSH', KEYS[1], unpack(ARGV, first, math.min(first + 1499, #ARGV)))
end
-- From the first chunk on: a task that dies later leaves nothing for ever.
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1

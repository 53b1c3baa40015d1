-- delete_dead: delete jobs from the dead-letter stream, and free their ids.
-- KEYS  1 dead-letter stream   2 a marker that no job has
--       then per job: unique, dlid, the markers that keep its id from being added again
-- ARGV  per job: id in the dead-letter stream, when it was created (ms), or '' if that cannot be read
-- Returns how many were deleted. A marker says when the job was created that took the id: one of a newer
-- job stays. Before anything is changed, each command is used once to no effect: one that is denied fails
-- there.
redis.call('GET', KEYS[2])
redis.call('DEL', KEYS[2])
redis.call('XDEL', KEYS[1], '0-0')
local deleted = 0
for i = 1, #ARGV, 2 do
  if #redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i]) == 1 then
    for key = i + 2, i + 3 do
      if string.match(redis.call('GET', KEYS[key]) or '', '^%d+') == ARGV[i + 1] then
        redis.call('DEL', KEYS[key])
      end
    end
    redis.call('XDEL', KEYS[1], ARGV[i])
    deleted = deleted + 1
  end
end
return deleted

-- spark_walk: count the entries of a part of a stream without moving them to the client.
-- KEYS  1 stream
-- ARGV  1 id to begin behind   2 last id, or '+'   3 entries per mark   4 most entries to count
-- Returns {entries ever added or -1 if the server does not count them, length, first id, last id that
-- was ever given, then per mark: its last id, entries}. The first two tell, in the same moment as the
-- walk, how many entries were trimmed. An empty or missing stream has no ids ('').
local key, after, last, step, left = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', key) == 0 then
  return {0, 0, '', '0-0'}
end
local facts = {}
local info = redis.call('XINFO', 'STREAM', key)
for i = 1, #info, 2 do
  facts[info[i]] = info[i + 1]
end
local first = facts['first-entry']
local answer = {facts['entries-added'] or -1, facts['length'], first and first[1] or '',
                facts['last-generated-id']}
while left > 0 do
  local most = math.min(step, left)
  local page = redis.call('XRANGE', key, '(' .. after, last, 'COUNT', most)
  if #page == 0 then
    break
  end
  after = page[#page][1]
  answer[#answer + 1] = after
  answer[#answer + 1] = #page
  left = left - #page
  if #page < most then
    break
  end
end
return answer

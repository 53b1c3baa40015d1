-- reader: one who reads a log is alive, and has read so far; or it is forgotten.
-- KEYS  1 config
-- ARGV  1 what config calls the stream   2 ms after which one that is dead is forgotten   3 the reader's name
--       then, unless it is forgotten: 4 ms that it counts as alive from now on   5 the most entries that the
--       stream may have for its sake   6 id of the last entry that it has read   7 ordinal of that entry
--       among all ever added, or '-' if it is not known
-- Returns 1 if the reader was known, else 0.
-- The field <stream>_readers has a line per reader: until when it is alive (unix ms, by the server's clock),
-- then 5, 6, 7 and its name.
local field, name, lease = ARGV[1] .. '_readers', ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lines, known = {}, 0
for line in string.gmatch(redis.call('HGET', KEYS[1], field) or '', '[^\n]+') do
  local until_ms, other = string.match(line, '^(%d+) %d+ %S+ %S+ (.*)$')
  if other == name then
    known = 1
  elseif until_ms and tonumber(until_ms) > now - tonumber(ARGV[2]) then
    lines[#lines + 1] = line
  end
end
if lease then
  local words = {string.format('%.0f', now + lease), ARGV[5], ARGV[6], ARGV[7], name}
  lines[#lines + 1] = table.concat(words, ' ')
end
if #lines > 0 then
  redis.call('HSET', KEYS[1], field, table.concat(lines, '\n'))
else
  redis.call('HDEL', KEYS[1], field)
end
return known

-- The parts of an envelope, for scripts that tell of jobs; they are put behind this file.
local function number(bytes, at, width)
  local value = 0
  for i = at, at + width - 1 do
    value = value * 256 + (string.byte(bytes, i) or 0)
  end
  return value
end

-- Width of a number behind its type byte, by that byte; of a small one: 0.
local WIDTHS = {[204] = 1, [205] = 2, [206] = 4, [207] = 8, [208] = 1, [209] = 2, [210] = 4, [211] = 8}

-- Whether an id tells when it was made.
local function is_ulid(id)
  return #id == 26 and string.find(id, '^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]+$')
end

-- Of an envelope, [id: str, payload: bin, created: uint, attempt: uint, …], the id, the attempt, and, where
-- the id does not tell, when the job was created; nothing if it is no envelope.
local function read(envelope)
  local kind, at, size = string.byte(envelope, 2), 3, nil
  if kind and kind >= 160 and kind <= 191 then
    size = kind - 160
  elseif kind == 217 or kind == 218 then
    size = number(envelope, at, kind - 216)
    at = at + kind - 216
  else
    return nil
  end
  local id = string.sub(envelope, at, at + size - 1)
  at = at + size
  kind = string.byte(envelope, at)
  if not kind or kind < 196 or kind > 198 then
    return nil
  end
  local width = 2 ^ (kind - 196)
  at = at + 1 + width + number(envelope, at + 1, width)
  kind = string.byte(envelope, at)
  if not kind then
    return nil
  end
  width = WIDTHS[kind] or 0
  local created
  if not is_ulid(id) then
    created = string.format('%.0f', width > 0 and number(envelope, at + 1, width) or kind)
  end
  at = at + 1 + width
  kind = string.byte(envelope, at)
  if not kind then
    return nil
  end
  return id, WIDTHS[kind] and number(envelope, at + 1, WIDTHS[kind]) or kind, created
end

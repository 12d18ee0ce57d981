-- Put before acquire.lua and reissue.lua: read the counter, write the next token.

-- Returns the counter as a number, false if it is missing, or nil and what is wrong with it.
local function read_counter(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return false end
  local stored = kind == 'string' and redis.call('GET', key) or ''
  if not string.match(stored, '^%d+$') or #stored > 16 then return nil, 'unreadable' end
  return tonumber(stored)
end

-- Returns the token as text, or nil and 'exhausted' if it would reach the limit. The first write
-- of a script: where the memory is full Redis refuses it, and then nothing has been written.
local function write_counter(key, token, limit, idle)
  if token >= limit then return nil, 'exhausted' end
  local text = string.format('%.0f', token)
  redis.call('SET', key, text, 'PX', idle)
  return text
end

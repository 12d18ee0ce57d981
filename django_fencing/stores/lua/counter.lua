-- Put before acquire.lua and reissue.lua: read the counter, write the next token.

-- Returns the counter as a number, false if it is missing, or nil and what is wrong with it.
local function read_counter(key)
  local stored = read('GET', key)
  if stored == false then return false end
  if not stored or not string.match(stored, '^%d+$') or #stored > 16 then return nil, 'unreadable' end
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

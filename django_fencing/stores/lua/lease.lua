-- Put before every script: the time, and who holds the lease.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Returns the holder, false if there is no lease, nil if it cannot be read.
local function holder_of(lease)
  local kind = redis.call('TYPE', lease).ok
  if kind == 'none' then return false end
  return kind == 'hash' and redis.call('HGET', lease, 'holder') or nil
end

-- Read a value: false if it is missing, nil if the key holds another kind.
local function read(...)
  local value = redis.pcall(...)
  if type(value) ~= 'table' then return value end
  if string.find(value.err, 'WRONGTYPE', 1, true) then return nil end
  return error(value) -- that of an ACL, say
end

-- Say whether `holder` has the lease. It is one call where holder_of() may need two.
local function is_of(lease, holder)
  return read('HGET', lease, 'holder') == holder
end

-- Put a member into a sorted set that lives for so many ms from now. Where an ACL forbids PEXPIRE it
-- is refused before anything is written that would have no expiry.
local function put(set, score, member, life)
  local was_there = redis.call('PEXPIRE', set, life)
  redis.call('ZADD', set, score, member)
  if was_there == 0 then redis.call('PEXPIRE', set, life) end
end

-- Forget the holders that were done more than a minute ago. It is a write also where there is
-- nothing to forget, so a server that has become a replica answers READONLY, not its old state.
local function forget_done(done)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', now - 60000)
end

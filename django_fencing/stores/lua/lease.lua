-- Put before every script: the time, and who holds the lease.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Returns the holder, false if there is no lease, nil if it cannot be read.
local function holder_of(lease)
  local kind = redis.call('TYPE', lease).ok
  if kind == 'none' then return false end
  return kind == 'hash' and redis.call('HGET', lease, 'holder') or nil
end

-- Forget the holders that were done more than a minute ago. It is a write also where there is
-- nothing to forget, so a server that has become a replica answers READONLY, not its old state.
local function forget_done(done)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', now - 60000)
end

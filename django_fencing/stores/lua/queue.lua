-- Put before acquire.lua and release.lua: who waits, in the order of first come, first served.
--
-- The queue has the waiters by the microsecond at which each came, the beats by the millisecond
-- until which each counts as alive. A waiter blocks on a list of its own, whose name is that of
-- the lists of all followed by the waiter, in the same slot of a cluster.

local reservation = 100 -- ms, for which the lock is kept for a waiter whose turn it is
local forgotten = 10000 -- ms, after which nothing is left of waiters that are no more

-- Take a waiter out of the line.
local function leave_queue(queue, beats, waiter)
  redis.call('ZREM', queue, waiter)
  redis.call('ZREM', beats, waiter)
end

-- Leave nothing of a waiter that waits no more.
local function forget_waiter(queue, beats, lists, waiter)
  leave_queue(queue, beats, waiter)
  redis.call('DEL', lists .. waiter)
end

-- Return the first waiter that is alive, false if nobody waits.
local function first_waiter(queue, beats)
  local first = redis.call('ZRANGE', queue, 0, 0)[1]
  while first do
    local alive = redis.call('ZSCORE', beats, first)
    if alive and tonumber(alive) > now then return first end
    leave_queue(queue, beats, first)
    first = redis.call('ZRANGE', queue, 0, 0)[1]
  end
  return false
end

-- Keep the free lock for the waiter `first`, and wake it. It is out of the line then: one that
-- does not come costs the others no more than the reservation.
local function reserve(lease, queue, beats, lists, first)
  redis.call('PEXPIRE', lease, reservation) -- where an ACL forbids it, nothing is reserved for ever
  leave_queue(queue, beats, first)
  redis.call('HSET', lease, 'reserved', first)
  redis.call('PEXPIRE', lease, reservation)
  redis.call('RPUSH', lists .. first, '1')
  redis.call('PEXPIRE', lists .. first, forgotten)
end

-- Return for whom the lock is kept, false if for nobody.
local function reserved_for(lease)
  return redis.call('TYPE', lease).ok == 'hash' and redis.call('HGET', lease, 'reserved')
end

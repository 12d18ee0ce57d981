-- End the holder's own lease, or its waiting, and remember that the holder is done. If the lock is
-- free then and somebody waits, keep it for the first one, and wake that one.
--
-- KEYS  1 lease  2 done  3 held  4 queue  5 beats  6 lists of waiters
-- ARGV  1 holder  2 member of held  3 idle ttl ms  4 '1' if the holder will ask again
-- returns  'freed' if this or an earlier run has ended the lease, else 'lost'
forget_done(KEYS[2])
local mine = is_of(KEYS[1], ARGV[1])
local kept = not mine and reserved_for(KEYS[1]) == ARGV[1]
local free = mine or kept or holder_of(KEYS[1]) == false
if mine or kept then redis.call('DEL', KEYS[1]) end

local freed = mine
if ARGV[4] ~= '1' then
  -- The half millisecond says that the lease was freed, to a run whose reply was lost.
  local score = not mine and redis.call('ZSCORE', KEYS[2], ARGV[1])
  freed = mine or (score and tonumber(score) % 1 > 0)
  put(KEYS[2], now + (freed and 0.5 or 0), ARGV[1], math.min(60000, tonumber(ARGV[3])))
end
if mine then
  redis.call('ZREM', KEYS[3], ARGV[2])
else
  forget_waiter(KEYS[4], KEYS[5], KEYS[6], ARGV[1])
end
if free then
  local first = first_waiter(KEYS[4], KEYS[5])
  if first then reserve(KEYS[1], KEYS[4], KEYS[5], KEYS[6], first) end
end
return freed and 'freed' or 'lost'

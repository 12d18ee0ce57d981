-- End the holder's own lease.
--
-- KEYS  1 lease  2 held (sorted set)  3 tombstone of this holder
-- ARGV  1 holder  2 member of held  3 life of the tombstone, ms; 0 leaves none
-- returns  'freed', 'gone' if there is no lease, 'other' if it is not the holder's
local outcome = 'other'
if redis.pcall('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.pcall('ZREM', KEYS[2], ARGV[2])
  outcome = 'freed'
elseif redis.call('EXISTS', KEYS[1]) == 0 then
  outcome = 'gone'
end
if ARGV[3] ~= '0' then redis.call('SET', KEYS[3], '', 'PX', ARGV[3]) end
return outcome

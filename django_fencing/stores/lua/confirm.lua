-- Say whether the lease is still the holder's.
--
-- KEYS  1 lease
-- ARGV  1 holder
-- returns  'mine' or 'lost'
if redis.pcall('HGET', KEYS[1], 'holder') == ARGV[1] then return 'mine' end
return 'lost'

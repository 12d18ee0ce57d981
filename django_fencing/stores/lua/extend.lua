-- Let the holder's own lease end a ttl from now.
--
-- KEYS  1 lease  2 done  3 held
-- ARGV  1 holder  2 ttl ms  3 member of held  4 idle ttl ms
-- returns  'mine' or 'lost'
forget_done(KEYS[2])
if not is_of(KEYS[1], ARGV[1]) then return 'lost' end
local ttl = tonumber(ARGV[2])
redis.call('PEXPIRE', KEYS[1], ttl)
put(KEYS[3], now + ttl, ARGV[3], math.max(ttl, tonumber(ARGV[4])))
return 'mine'

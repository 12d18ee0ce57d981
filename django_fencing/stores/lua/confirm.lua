-- Say whether the lease is still the holder's.
--
-- KEYS  1 lease  2 done
-- ARGV  1 holder
-- returns  'mine' or 'lost'
forget_done(KEYS[2])
if is_of(KEYS[1], ARGV[1]) then return 'mine' end
return 'lost'

-- Let the holder's own lease end a ttl from now.
--
-- KEYS  1 lease  2 held (sorted set)
-- ARGV  1 holder  2 ttl ms  3 member of held
-- returns  'mine' or 'lost'
if redis.pcall('HGET', KEYS[1], 'holder') ~= ARGV[1] then return 'lost' end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local time = redis.call('TIME')
redis.pcall('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[3])
return 'mine'

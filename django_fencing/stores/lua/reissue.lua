-- Give the holder's own lease a token above what the fence has reached.
--
-- KEYS  1 lease  2 done  3 counter
-- ARGV  1 holder  2 token of the fence  3 jump  4 token limit  5 idle ttl ms
-- returns  {'granted', token}, {'lost'} if the lease is not the holder's any more,
--          {'unreadable'} or {'exhausted'} as acquire.lua
if not is_of(KEYS[1], ARGV[1]) then
  forget_done(KEYS[2])
  return {'lost'}
end

local counter, fault = read_counter(KEYS[3])
if fault then return {fault} end
local token = math.max(counter or 0, tonumber(ARGV[2]) + tonumber(ARGV[3])) + 1

local text, exhausted = write_counter(KEYS[3], token, tonumber(ARGV[4]), tonumber(ARGV[5]))
if exhausted then return {exhausted} end
redis.call('HSET', KEYS[1], 'token', text)
return {'granted', text}

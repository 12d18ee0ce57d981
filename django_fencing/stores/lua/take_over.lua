-- Swap the lease that an operator was shown for a short one of the operator's own, with the next
-- token, so that the former holder can be fenced. Whoever holds the resource meanwhile keeps it.
--
-- KEYS  1 lease  2 done  3 held  4 counter
-- ARGV  1 operator's holder  2 ttl ms  3 floor  4 jump  5 token limit  6 idle ttl ms
--       7 member of held  8 the shown holder, or 'sha1:' and the digest of what cannot be read
--       9 layout version  10 host  11 pid  12 function  13 model  14 pk
-- returns  {'granted', token}
--          {'gone'}  nobody holds the resource
--          {'done'}  the operator has given up already: the call came late
--          {'held', remaining ms (-1: no expiry), host, pid, function}  by another than was shown
--          {'unreadable'} or {'exhausted'} as acquire.lua
local holder, ttl, floor = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local present = holder_of(KEYS[1])
forget_done(KEYS[2])
if redis.call('ZSCORE', KEYS[2], holder) then return {'done'} end
if present == false then return {'gone'} end
if present == holder then return {'granted', redis.call('HGET', KEYS[1], 'token')} end

-- What is no holder's id is known by its digest.
if present and not (#present == 32 and string.match(present, '^%x+$')) then present = nil end
local shown = present
if not present then shown = 'sha1:' .. redis.sha1hex(redis.call('DUMP', KEYS[1])) end
if shown ~= ARGV[8] then
  local answer = {'held', redis.call('PTTL', KEYS[1])}
  if present then
    for _, field in ipairs(redis.call('HMGET', KEYS[1], 'host', 'pid', 'function')) do
      table.insert(answer, field or '')
    end
  end
  return answer
end

local counter, fault = read_counter(KEYS[4])
if fault then return {fault} end
local its_own = present and redis.call('HGET', KEYS[1], 'token') or ''
its_own = string.match(its_own, '^%d+$') and tonumber(its_own) or 0
local token = math.max(counter or 0, floor, its_own) + (counter and 1 or tonumber(ARGV[4]))

local text, exhausted = write_counter(KEYS[4], token, tonumber(ARGV[5]), tonumber(ARGV[6]))
if exhausted then return {exhausted} end

put(KEYS[3], now + ttl, ARGV[7], math.max(tonumber(ARGV[6]), ttl))
-- What the former holder has sent before, and comes late, is refused.
if present then put(KEYS[2], now, present, math.min(60000, tonumber(ARGV[6]))) end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'layout', ARGV[9], 'holder', holder, 'token', text,
  'host', ARGV[10], 'pid', ARGV[11], 'function', ARGV[12], 'model', ARGV[13], 'pk', ARGV[14],
  'ttl', ARGV[2], 'acquired_at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ttl)
return {'granted', text}

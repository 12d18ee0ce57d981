-- Grant the lease unless another holder has it.
--
-- KEYS  1 lease (hash)  2 counter  3 held (sorted set)  4 tombstone of this holder
-- ARGV  1 holder  2 ttl ms  3 floor  4 jump  5 token limit  6 idle ttl ms  7 member of held
--       8 layout version  9 host  10 pid  11 function  12 model  13 pk
-- returns  {'granted', token}
--          {'held', remaining ms (-1: no expiry), host, pid, function}, the last three if readable
--          {'buried'}  this holder has given up or released already
--          {'unreadable'} or {'exhausted'}  the counter gives no token; nothing was written
local holder, ttl, floor = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local jump, limit, idle = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

if redis.call('EXISTS', KEYS[4]) == 1 then return {'buried'} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local remaining = redis.call('PTTL', KEYS[1])
if remaining ~= -2 then
  local present = redis.pcall('HMGET', KEYS[1], 'layout', 'holder', 'token', 'host', 'pid', 'function')
  if present.err or present[1] ~= ARGV[8] then return {'held', remaining} end
  if present[2] ~= holder then
    return {'held', remaining, present[4] or '', present[5] or '', present[6] or ''}
  end
  if remaining < ttl then
    redis.call('PEXPIRE', KEYS[1], ttl)
    redis.pcall('ZADD', KEYS[3], now + ttl, ARGV[7])
  end
  return {'granted', present[3]}
end

local counter, fault = read_counter(KEYS[2])
if fault then return {fault} end
local token
if counter then token = math.max(counter, floor) + 1
elseif floor > 0 then token = floor + jump
else token = 1 end

local text, exhausted = write_counter(KEYS[2], token, limit, idle)
if exhausted then return {exhausted} end

redis.call('ZADD', KEYS[3], now + ttl, ARGV[7])
redis.call('PEXPIRE', KEYS[3], math.max(idle, ttl))
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - 3600000, 'LIMIT', 0, 4)
if #lapsed > 0 then redis.call('ZREM', KEYS[3], unpack(lapsed)) end

-- On the missing key this does nothing, but an ACL that forbids it refuses it here, before a
-- lease could be left without expiry.
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('HSET', KEYS[1], 'layout', ARGV[8], 'holder', holder, 'token', text,
  'host', ARGV[9], 'pid', ARGV[10], 'function', ARGV[11], 'model', ARGV[12], 'pk', ARGV[13],
  'ttl', ARGV[2], 'acquired_at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ttl)
return {'granted', text}

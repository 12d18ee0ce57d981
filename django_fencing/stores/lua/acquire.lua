-- Grant the lease unless another holder has it.
--
-- KEYS  1 lease (hash)  2 done (sorted set)  3 held (sorted set)  4 counter
-- ARGV  1 holder  2 ttl ms  3 floor  4 jump  5 token limit  6 idle ttl ms  7 member of held
--       8 layout version  9 host  10 pid  11 function  12 model  13 pk
-- returns  {'granted', token}
--          {'held', remaining ms (-1: no expiry), host, pid, function}, the last three if readable
--          {'done'}  this holder has released or given up already: the call came late
--          {'unreadable'} or {'exhausted'}  the counter gives no token; nothing was written
local holder, ttl, floor = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local jump, limit, idle = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local function hold()
  redis.call('ZADD', KEYS[3], now + ttl, ARGV[7])
  redis.call('PEXPIRE', KEYS[3], math.max(idle, ttl))
end

local present = holder_of(KEYS[1])
if present ~= false or redis.call('ZSCORE', KEYS[2], holder) then
  forget_done(KEYS[2])
end
if present == holder then
  if redis.call('PTTL', KEYS[1]) < ttl then
    redis.call('PEXPIRE', KEYS[1], ttl)
    hold()
  end
  return {'granted', redis.call('HGET', KEYS[1], 'token')}
elseif present ~= false then
  local answer = {'held', redis.call('PTTL', KEYS[1])}
  if present and redis.call('HGET', KEYS[1], 'layout') == ARGV[8] then
    for _, field in ipairs(redis.call('HMGET', KEYS[1], 'host', 'pid', 'function')) do
      table.insert(answer, field or '')
    end
  end
  return answer
elseif redis.call('ZSCORE', KEYS[2], holder) then
  return {'done'}
end

local counter, fault = read_counter(KEYS[4])
if fault then return {fault} end
local token
if counter then token = math.max(counter, floor) + 1
elseif floor > 0 then token = floor + jump
else token = 1 end

local text, exhausted = write_counter(KEYS[4], token, limit, idle)
if exhausted then return {exhausted} end

-- On the missing key this does nothing, but where an ACL forbids it it is refused here, before
-- anything could be left without expiry.
redis.call('PEXPIRE', KEYS[1], ttl)
hold()
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - 3600000, 'LIMIT', 0, 4)
if #lapsed > 0 then redis.call('ZREM', KEYS[3], unpack(lapsed)) end

redis.call('HSET', KEYS[1], 'layout', ARGV[8], 'holder', holder, 'token', text,
  'host', ARGV[9], 'pid', ARGV[10], 'function', ARGV[11], 'model', ARGV[12], 'pk', ARGV[13],
  'ttl', ARGV[2], 'acquired_at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ttl)
return {'granted', text}

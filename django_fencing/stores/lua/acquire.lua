-- Grant the lease unless another holder has it, or waits for it and came first.
--
-- KEYS  1 lease (hash)  2 done (sorted set)  3 held (sorted set)  4 counter
--       5 queue (sorted set)  6 beats (sorted set)  7 lists of waiters
-- ARGV  1 holder  2 ttl ms  3 floor  4 jump  5 token limit  6 idle ttl ms  7 member of held
--       8 ms for which the holder waits before it asks again, 0 if it does not wait
--       9 the microsecond at which it came, 0 if it comes now
--       10 layout version  11 host  12 pid  13 function  14 model  15 pk
-- returns  {'granted', token}
--          {'held', remaining ms (-1: no expiry), came, place in the line from 0 (-1: none),
--           host, pid, function}, the last three if readable, the function alone if the lock is
--           kept for a waiter
--          {'done'}  this holder has released or given up already: the call came late
--          {'unreadable'} or {'exhausted'}  the counter gives no token; nothing was written
local holder, ttl, floor = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local jump, limit, idle = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local waits, came = tonumber(ARGV[8]), tonumber(ARGV[9])

local function hold()
  put(KEYS[3], now + ttl, ARGV[7], math.max(idle, ttl))
end

local done = redis.call('ZSCORE', KEYS[2], holder)

-- Returns the place in the line, -1 if it does not wait.
local function stand_in_line()
  if waits == 0 or done then
    if came > 0 then forget_waiter(KEYS[5], KEYS[6], KEYS[7], holder) end
    return -1
  end
  -- The reply to an earlier attempt may be lost, and that attempt may even come later.
  local before = tonumber(redis.call('ZSCORE', KEYS[5], holder) or nil)
  if before and (came == 0 or before < came) then came = before end
  if came == 0 then came = time[1] * 1000000 + time[2] end
  put(KEYS[5], string.format('%.0f', came), holder, forgotten)
  -- Alive for half as long again as it waits before it asks again, and half a second.
  put(KEYS[6], now + waits * 1.5 + 500, holder, forgotten)
  return redis.call('ZRANK', KEYS[5], holder)
end

local function refuse()
  local place = stand_in_line()
  local answer = {'held', redis.call('PTTL', KEYS[1]), string.format('%.0f', came), place}
  if redis.call('TYPE', KEYS[1]).ok == 'hash' and redis.call('HGET', KEYS[1], 'layout') == ARGV[10] then
    for _, field in ipairs(redis.call('HMGET', KEYS[1], 'host', 'pid', 'function')) do
      table.insert(answer, field or '')
    end
  elseif reserved_for(KEYS[1]) then
    for _, field in ipairs({'', '', 'somebody whose turn it is'}) do table.insert(answer, field) end
  end
  return answer
end

local present = holder_of(KEYS[1])
if present ~= false or done then
  forget_done(KEYS[2])
end
if present == holder then
  if redis.call('PTTL', KEYS[1]) < ttl then
    redis.call('PEXPIRE', KEYS[1], ttl)
    hold()
  end
  return {'granted', redis.call('HGET', KEYS[1], 'token')}
end
if present ~= false and reserved_for(KEYS[1]) ~= holder then
  return refuse()
elseif done then
  return {'done'}
end
local waited = present ~= false or came > 0
if present == false then
  local first = first_waiter(KEYS[5], KEYS[6])
  waited = waited or first == holder
  -- One that has missed its turn comes before those who came later.
  local later = first and came > 0 and came < tonumber(redis.call('ZSCORE', KEYS[5], first))
  if first and first ~= holder and not later then
    reserve(KEYS[1], KEYS[5], KEYS[6], KEYS[7], first)
    return refuse()
  end
end

local counter, fault = read_counter(KEYS[4])
if fault then return {fault} end
local token
if counter then token = math.max(counter, floor) + 1
elseif floor > 0 then token = floor + jump
else token = 1 end

local text, exhausted = write_counter(KEYS[4], token, limit, idle)
if exhausted then return {exhausted} end

hold() -- before the lease: an ACL that forbids PEXPIRE is found out here
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - 3600000, 'LIMIT', 0, 4)
if #lapsed > 0 then redis.call('ZREM', KEYS[3], unpack(lapsed)) end

if present ~= false then redis.call('DEL', KEYS[1]) end
if waited then forget_waiter(KEYS[5], KEYS[6], KEYS[7], holder) end
redis.call('HSET', KEYS[1], 'layout', ARGV[10], 'holder', holder, 'token', text,
  'host', ARGV[11], 'pid', ARGV[12], 'function', ARGV[13], 'model', ARGV[14], 'pk', ARGV[15],
  'ttl', ARGV[2], 'acquired_at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ttl)
return {'granted', text}

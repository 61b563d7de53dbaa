-- One tenant's account in Redis: what account.py, bucket.py and places.py do, in one atomic script. They say why; a test
-- holds this equal to them. It adds leases: who holds a reservation must have been heard of lately.
--
-- KEYS 1 account  packed: two buckets (requests, tokens; a rate of 0 is no limit), each with its open debts, and numbers
--      2 open     id -> packed {holder, tokens, used, admitted, span of requests, span of tokens}
--      3 places   sorted by due time: "number|caller|cost in requests|cost in tokens"
--      4 callers  caller -> packed {how many places, the last of them}
--      5 holders  name -> when its lease ends
--      6 since    which run of Redis this is, and since when it knows anything
-- ARGV 1 operation, 2 now in µs or 0 for this server's clock, then the operation's own:
--      reserve  id holder requests_rate requests_capacity tokens_rate tokens_capacity concurrency largest grace quantum
--               tokens caller
--      restore  id holder (the same quota) tokens used
--      settle   id used        release  id        progress  id used        beat  holder lease run_id
-- Integers up to 2^53 are exact here: debts up to 150 million tokens.

local ACCOUNT, OPEN, PLACES, CALLERS, HOLDERS, SINCE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local UNIT, US, PER_CALLER, IN_ALL, MEMORY, EARLY, SWEEP_US = 60000000, 1000000, 64, 1024, 10, 5000, 500000
local NOBODY = '-1'
local call, max, min, floor = redis.call, math.max, math.min, math.floor
local op, now = ARGV[1], tonumber(ARGV[2])
if now == 0 then
  local t = call('TIME')
  now = t[1] * US + t[2]
end
local account

local function ceil_div(amount, by)
  local q = floor(amount / by)
  while q * by < amount do q = q + 1 end
  return q
end

local function num_open() return call('HLEN', OPEN) end
local function num_places() return call('ZCARD', PLACES) end
local function whole(number) return string.format('%.0f', number) end

local function save()
  local rest = 0
  for _, b in ipairs(account.buckets) do
    if b.rate > 0 then rest = max(rest, b.owed / b.rate) end
  end
  if num_open() > 0 or num_places() > 0 then rest = max(rest, 86400 * US) end
  local ms = math.ceil(rest / 1000) + 60000
  call('SET', ACCOUNT, cmsgpack.pack(account), 'PX', ms)
  for _, key in ipairs({OPEN, PLACES, CALLERS}) do call('PEXPIRE', key, ms) end
end

-- bucket.py: a span is {id, debt, open}. Merged into an older one it is gone, and its id finds the next older. ----------
local function find_span(b, id)
  local index = #b.spans
  while index > 0 and b.spans[index][1] > id do index = index - 1 end
  return index
end

local function pay(b, index, amount)
  local left = amount
  while index > 0 do
    local span, older = b.spans[index], b.spans[index - 1]
    if span[2] > left then
      span[2] = span[2] - left
      return amount
    end
    left = left - span[2]
    if older then older[3] = older[3] + span[3] end
    table.remove(b.spans, index)
    index = index - 1
  end
  return amount - left
end

local function refill(to)
  local elapsed = to - account.at
  if elapsed <= 0 then return end
  account.at = to
  for _, b in ipairs(account.buckets) do
    local paid = min(elapsed * b.rate, b.owed)
    local spilled = elapsed * b.rate - paid
    local loose = min(b.loose, paid)
    b.owed = b.owed - paid
    b.loose = b.loose - loose
    if paid > loose then pay(b, #b.spans, paid - loose) end
    if spilled > 0 then
      local asked = min(b.promised, b.rate * (b.crowding + account.grace))
      b.spare = max(0, b.capacity - asked, b.spare - spilled)
    end
  end
end

local function level(b) return b.capacity - b.owed end
local function need(b, cost) return min(cost, b.capacity) end

local function take(b, cost)
  if b.rate == 0 then return 0 end
  account.spans = account.spans + 1
  table.insert(b.spans, {account.spans, b.loose + cost, 1})
  b.loose = 0
  b.owed = b.owed + cost
  return account.spans
end

local function close_span(b, id, unused)
  if id == 0 or b.rate == 0 then return 0 end
  if unused > 0 then unused = pay(b, find_span(b, id), unused) else b.loose = b.loose - unused end
  b.owed = b.owed - unused
  local index = find_span(b, id)
  local span, newer = b.spans[index], b.spans[index + 1]
  if span then
    span[3] = span[3] - 1
    if span[3] == 0 then
      if newer then newer[2] = newer[2] + span[2] else b.loose = b.loose + span[2] end
      table.remove(b.spans, index)
    end
  end
  return unused
end

-- places.py -------------------------------------------------------------------------------------------------------------
local function parse(member)
  local caller, requests, tokens = string.match(member, '^%d+|(.*)|(%d+)|(%d+)$')
  return {member = member, caller = caller, costs = {tonumber(requests), tonumber(tokens)}}
end

local function insert(caller, costs, due)
  account.numbered = account.numbered + 1
  local member = string.format('%016.0f|%s|%.0f|%.0f', account.numbered, caller, costs[1], costs[2])
  call('ZADD', PLACES, whole(due), member)
end

local function drop(place)
  call('ZREM', PLACES, place.member)
  local mine = cmsgpack.unpack(call('HGET', CALLERS, place.caller))
  if mine[1] > 1 then
    call('HSET', CALLERS, place.caller, cmsgpack.pack({mine[1] - 1, mine[2]}))
  else
    call('HDEL', CALLERS, place.caller)
  end
  for k, b in ipairs(account.buckets) do
    b.promised = b.promised - place.costs[k]
    b.spare = b.spare + place.costs[k]
  end
end

local function advance()
  local first = call('ZRANGE', PLACES, 0, 0, 'WITHSCORES')
  while first[1] and first[2] + account.grace < now do
    refill(first[2] + account.grace)
    drop(parse(first[1]))
    first = call('ZRANGE', PLACES, 0, 0, 'WITHSCORES')
  end
  refill(now)
end

local function due_for(caller, costs)
  for _, member in ipairs(call('ZRANGEBYSCORE', PLACES, '-inf', whole(now))) do
    local place = parse(member)
    if place.caller == caller and costs[1] <= place.costs[1] and costs[2] <= place.costs[2] then return place end
  end
end

local function keep(caller, costs, earliest, quantum)
  local packed, waiting = call('HGET', CALLERS, caller), num_places()
  local mine = packed and cmsgpack.unpack(packed) or {0, 0}
  if mine[1] >= PER_CALLER and mine[2] > now then return mine[2] + EARLY end
  if waiting >= IN_ALL then return max(account.last_due, now + quantum) end
  local due = max(earliest, account.barrier)
  for k, b in ipairs(account.buckets) do
    if b.rate > 0 then
      local missing = b.promised + need(b, costs[k]) - level(b)
      if waiting > 0 then missing = missing + b.spare end
      local unspilt = b.pace + account.grace - floor((b.capacity - need(b, costs[k])) / b.rate)
      due = max(due, now + ceil_div(missing, b.rate), unspilt)
      if costs[k] > b.capacity then due = max(due, account.last_due + account.grace) end
    end
  end
  due = now + max(1, ceil_div(due + EARLY - now, quantum)) * quantum - EARLY
  for k, b in ipairs(account.buckets) do
    if b.rate > 0 then
      if waiting == 0 then
        b.crowding = 0
        b.spare = level(b) + b.rate * (due - now) - need(b, costs[k])
      end
      b.promised = b.promised + costs[k]
      b.pace = max(b.pace, due) + ceil_div(costs[k], b.rate)
      b.crowding = max(b.crowding, b.pace - due)
      if costs[k] > b.capacity then account.barrier = max(account.barrier, due + account.grace) end
    end
  end
  account.last_due = max(account.last_due, due)
  insert(caller, costs, due)
  call('HSET', CALLERS, caller, cmsgpack.pack({mine[1] + 1, max(mine[2], due)}))
  return due + EARLY
end

-- account.py ------------------------------------------------------------------------------------------------------------
local function begin()
  call('DEL', OPEN, PLACES, CALLERS)
  account = {at = now, grace = 0, mean_open = US, last_due = 0, barrier = 0, swept = now, spans = 0, numbered = 0,
    buckets = {}}
  for k = 1, 2 do
    account.buckets[k] = {rate = 0, capacity = 0, owed = 0, loose = 0, spare = 0, promised = 0, pace = 0, crowding = 0,
      spans = {}}
  end
end

local function load()
  local since = tonumber(call('HGET', SINCE, 'since') or 0)
  local packed = call('GET', ACCOUNT)
  account = packed and cmsgpack.unpack(packed)
  -- What is older than this run comes from a snapshot, and who knows what was given out after it.
  if account and account.at < since then account = nil end
  return since
end

local function set_up(quota, since)
  if since == 0 then
    since = now
    call('HSET', SINCE, 'since', whole(now))
  end
  if not account then begin() end
  advance()
  for k, b in ipairs(account.buckets) do
    local rate, capacity = quota.rates[k], quota.capacities[k]
    if (b.rate == 0) ~= (rate == 0) then  -- a limit appeared or went: its bucket and all places begin anew
      for _, member in ipairs(call('ZRANGE', PLACES, 0, -1)) do drop(parse(member)) end
      b.owed = rate == 0 and 0 or max(0, capacity - (now - since) * rate)
      b.spans, b.loose, b.spare, b.pace, b.crowding = {}, b.owed, 0, 0, 0
    end
    b.rate, b.capacity = rate, capacity
  end
  account.grace = quota.grace
end

local function read_quota(at)
  local n = {}
  for i = 0, 7 do n[i] = tonumber(ARGV[at + i]) end
  return {rates = {n[0], n[2]}, capacities = {n[1], n[3]}, concurrency = n[4], largest = n[5], grace = n[6], quantum = n[7]}
end

local function open_one(id, holder, tokens, used, spans)
  call('HSET', OPEN, id, cmsgpack.pack({holder, tokens, used, now, spans[1], spans[2]}))
end

local function close(id, entry, unused_requests, unused_tokens)
  call('HDEL', OPEN, id)
  account.mean_open = account.mean_open + floor((now - entry[4] - account.mean_open) / MEMORY)
  local waiting = num_places() > 0
  for k, unused in ipairs({unused_requests, unused_tokens}) do
    local b = account.buckets[k]
    local returned = close_span(b, entry[4 + k], unused)
    if waiting then b.spare = b.spare + returned end
  end
end

local function sweep()  -- leases that ran out
  if now - account.swept < SWEEP_US then return end
  account.swept = now
  local alive, all = {}, call('HGETALL', OPEN)
  for i = 1, #all, 2 do
    local entry = cmsgpack.unpack(all[i + 1])
    local holder = entry[1]
    if alive[holder] == nil then
      alive[holder] = tonumber(call('HGET', HOLDERS, holder) or 0) > now
    end
    if not alive[holder] then close(all[i], entry, 0, (entry[2] - entry[3]) * UNIT) end
  end
end

local function fits(quota, costs)
  if quota.concurrency > 0 and num_open() >= quota.concurrency then return false end
  for k, b in ipairs(account.buckets) do
    if b.rate > 0 and level(b) < need(b, costs[k]) then return false end
  end
  return account.buckets[2].rate == 0 or costs[2] <= quota.largest
end

local function has_room(quota, costs)
  if not fits(quota, costs) then return false end
  if quota.concurrency > 0 and num_open() + call('ZCOUNT', PLACES, '-inf', whole(now)) >= quota.concurrency then
    return false
  end
  for k, b in ipairs(account.buckets) do
    if b.rate > 0 and costs[k] > b.spare then return false end
  end
  return true
end

local function why(quota, costs)
  local short = nil
  for k, b in ipairs(account.buckets) do
    if b.rate > 0 and level(b) < need(b, costs[k]) then short = k end
  end
  if not short and (quota.concurrency == 0 or num_open() < quota.concurrency) then
    for k, b in ipairs(account.buckets) do
      if b.rate > 0 and costs[k] > b.spare then short = k end
    end
  end
  return short == 2 and 'tokens_per_minute' or short == 1 and 'requests_per_minute' or 'concurrency'
end

local function admit(id, holder, tokens, costs)
  local spans = {}
  for k, b in ipairs(account.buckets) do
    b.spare = b.spare - costs[k]
    spans[k] = take(b, costs[k])
  end
  open_one(id, holder, tokens, 0, spans)
  return {1}
end

local function refuse(quota, tokens, costs, caller)
  if account.buckets[2].rate > 0 and tokens * UNIT > quota.largest then return {0, 'too_large_for_burst', 0, 0} end
  local reason, earliest = why(quota, costs), now
  if caller == NOBODY then return {0, reason, 0, 0} end
  if reason == 'concurrency' then
    earliest = earliest + floor(account.mean_open * (1 + num_places()) / quota.concurrency)
  end
  return {0, reason, keep(caller, costs, earliest, quota.quantum) - now, 0}
end

local function reserve(id, holder, quota, tokens, caller)
  local costs = {account.buckets[1].rate > 0 and UNIT or 0, account.buckets[2].rate > 0 and tokens * UNIT or 0}
  local is_free = num_places() == 0
  local place = not is_free and due_for(caller, costs)
  if place and not fits(quota, costs) then
    call('ZREM', PLACES, place.member)
    insert(caller, place.costs, now)
    return {0, why(quota, costs), quota.quantum, 1}
  elseif place then
    drop(place)
    return admit(id, holder, tokens, costs)
  elseif is_free and fits(quota, costs) or not is_free and has_room(quota, costs) then
    return admit(id, holder, tokens, costs)
  end
  return refuse(quota, tokens, costs, caller)
end

if op == 'beat' then
  call('HSET', HOLDERS, ARGV[3], whole(now + tonumber(ARGV[4])))
  call('EXPIRE', HOLDERS, 86400)
  if call('HGET', SINCE, 'run') ~= ARGV[5] then call('HSET', SINCE, 'run', ARGV[5], 'since', whole(now)) end
  return {1}
end

local since, id = load(), ARGV[3]
local packed = account and call('HGET', OPEN, id)
local entry = packed and cmsgpack.unpack(packed)

if op == 'reserve' then
  local quota = read_quota(5)
  set_up(quota, since)
  sweep()
  local answer = reserve(id, ARGV[4], quota, tonumber(ARGV[13]), ARGV[14])
  save()
  return answer
elseif op == 'restore' then
  if entry then return {0} end
  set_up(read_quota(5), since)
  open_one(id, ARGV[4], tonumber(ARGV[13]), tonumber(ARGV[14]), {0, 0})
elseif not entry then
  return {0}
elseif op == 'progress' then
  entry[3] = tonumber(ARGV[4])
  call('HSET', OPEN, id, cmsgpack.pack(entry))
elseif op == 'settle' then
  advance()
  close(id, entry, 0, (entry[2] - tonumber(ARGV[4])) * UNIT)
elseif op == 'release' then
  advance()
  close(id, entry, UNIT, entry[2] * UNIT)
end
save()
return {1}

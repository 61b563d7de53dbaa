-- One tenant's account in Redis: what account.py, window.py, pacer.py and places.py do, in one atomic script. They say
-- why; a test holds this equal to them. It adds leases: who holds a reservation must have been heard of lately.
--
-- KEYS 1 account  packed: slots (four numbers each: start, newest, requests, tokens), places, levels of pacers, numbers
--      2 open     id -> packed {holder, tokens, used, admitted, start of its slot}
--      3 holders  name -> when its lease ends
--      4 since    which run of Redis this is, since when it knows anything, and from when it is trusted
-- ARGV 1 operation, 2 now in µs or 0 for this server's clock, then the operation's own:
--      reserve  id holder requests tokens requests_smooth tokens_smooth concurrency quantum tokens caller
--      restore  id holder (the same quota) quantum tokens used start_or_0
--      recall   start newest requests tokens, as often as there are slots: what a gateway knows that this run does not
--      settle   id used        release  id        progress  id used        beat  holder lease wait
-- Integers up to 2^53 are exact here: smooth limits up to 900 million tokens.

local ACCOUNT, OPEN, HOLDERS, SINCE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local US, MINUTE, SLOT, DEPTH, GRACE, EARLY = 1000000, 60000000, 100000, 10000000, 2000000, 5000
local MAX_PLACES, KEPT_SHARES, MEMORY, SWEEP_US, NOBODY = 256, {[0] = 4, [1] = 12}, 10, 500000, -1
local REASONS = {'requests_per_minute', 'tokens_per_minute'}
local call, max, min, floor, huge = redis.call, math.max, math.min, math.floor, math.huge
local op, now = ARGV[1], tonumber(ARGV[2])
if now == 0 then
  local t = call('TIME')
  now = t[1] * US + t[2]
end
local account, used = nil, {0, 0}

local function whole(number) return string.format('%.0f', number) end
local function num_open() return call('HLEN', OPEN) end

local function ceil_div(amount, by)
  local q = floor(amount / by)
  while q * by < amount do q = q + 1 end
  return q
end

local function save()
  local ms = 120000
  if num_open() > 0 then ms = 86400000 end
  call('SET', ACCOUNT, cmsgpack.pack(account), 'PX', ms)
  call('PEXPIRE', OPEN, ms)
end

-- window.py and pacer.py ------------------------------------------------------------------------------------------------
local function limit(k) return account.quota[k] end
local function is_smooth(k) return limit(k) > 0 and account.quota[2 + k] == 1 end
local function capacity(k) return max(MINUTE, limit(k) * DEPTH) end

local function count()
  used = {0, 0}
  for i = 1, #account.slots, 4 do
    for k = 1, 2 do used[k] = used[k] + account.slots[i + 1 + k] end
  end
end

local function add_pace(k, amount)
  if is_smooth(k) then account.levels[k] = min(capacity(k), account.levels[k] - amount * MINUTE) end
end

local function find_slot(start)
  local slots = account.slots
  for i = #slots - 3, 1, -4 do
    if slots[i] == start then return i end
    if slots[i] < start then return nil end
  end
end

local function add(i, amounts)
  for k = 1, 2 do
    if i then
      account.slots[i + 1 + k] = account.slots[i + 1 + k] + amounts[k]
      used[k] = used[k] + amounts[k]
    end
    add_pace(k, amounts[k])
  end
end

local function record(requests, tokens)
  local slots = account.slots
  local i = #slots - 3
  if i < 1 or now >= slots[i] + SLOT then
    i = #slots + 1
    slots[i], slots[i + 1], slots[i + 2], slots[i + 3] = now, now, 0, 0
  end
  slots[i + 1] = now
  add(i, {requests, tokens})
  return slots[i]
end

local function pace_has_room(k, cost)
  if cost == 0 or not is_smooth(k) then return true end
  return account.levels[k] >= min(capacity(k), (cost + account.kept[k]) * MINUTE)
end

-- places.py: a place is {due, caller, requests, tokens} -----------------------------------------------------------------
local function insert(place)
  local at = #account.places + 1
  while at > 1 and account.places[at - 1][1] > place[1] do at = at - 1 end
  table.insert(account.places, at, place)
  for k = 1, 2 do account.kept[k] = account.kept[k] + place[2 + k] end
end

local function remove_at(at)
  local place = table.remove(account.places, at)
  for k = 1, 2 do account.kept[k] = account.kept[k] - place[2 + k] end
  return place
end

local function remove(caller)
  for at, place in ipairs(account.places) do
    if place[2] == caller then return remove_at(at) end
  end
end

local function num_due()
  local due = 0
  for _, place in ipairs(account.places) do
    if place[1] > now then break end
    due = due + 1
  end
  return due
end

local function first_fit(k, cost, earliest, hold)
  if cost == 0 or limit(k) == 0 or used[k] + account.kept[k] + cost <= limit(k) then return earliest end
  local slots, places = account.slots, account.places
  local s, first, last = 1, 1, 1  -- the next slot that leaves, place that begins, place that ends
  local fits_from, level, room = earliest, used[k], limit(k) - cost
  while true do
    local at, change, which = huge, 0, 0
    if slots[s] then
      local newest = now >= slots[s] + SLOT and slots[s + 1] or slots[s] + SLOT
      at, change, which = newest + MINUTE, -slots[s + 1 + k], 1
    end
    if places[last] and places[last][1] + GRACE + SLOT + MINUTE < at then
      at, change, which = places[last][1] + GRACE + SLOT + MINUTE, -places[last][2 + k], 2
    end
    if places[first] and places[first][1] < at then
      at, change, which = places[first][1], places[first][2 + k], 3
    end
    if which == 0 then break end
    if which == 1 then s = s + 4 elseif which == 2 then last = last + 1 else first = first + 1 end
    if at > fits_from then
      if level > room then
        fits_from = at
      elseif at >= fits_from + hold + SLOT + MINUTE then
        break
      end
    end
    level = level + change
  end
  return fits_from
end

-- account.py ------------------------------------------------------------------------------------------------------------
local function begin()
  call('DEL', OPEN)
  account = {at = now, mean_open = US, swept = now, slots = {}, places = {}, kept = {0, 0}, levels = {0, 0},
    quota = {0, 0, 0, 0, 0}}
end

local function load()
  local since = tonumber(call('HGET', SINCE, 'since') or 0)
  local packed = call('GET', ACCOUNT)
  account = packed and cmsgpack.unpack(packed)
  -- What is older than this run comes from a snapshot, and who knows what was admitted after it.
  if account and account.at < since then account = nil end
end

local function advance()
  now = max(now, account.at)
  while account.places[1] and account.places[1][1] + GRACE < now do remove_at(1) end
  local slots, gone = account.slots, 0
  while slots[gone + 1] and slots[gone + 2] + MINUTE <= now do gone = gone + 4 end
  if gone > 0 then
    local rest = {}
    for i = gone + 1, #slots do rest[i - gone] = slots[i] end
    account.slots = rest
  end
  count()
  for k = 1, 2 do
    if is_smooth(k) then
      account.levels[k] = min(capacity(k), account.levels[k] + (now - account.at) * limit(k))
    end
  end
  account.at = now
end

local function set_up(quota)
  if not account then begin() end
  advance()
  local is_same = true
  for i = 1, 5 do is_same = is_same and account.quota[i] == quota[i] end
  if is_same then return end
  account.quota, account.places, account.kept = quota, {}, {0, 0}
  for k = 1, 2 do
    account.levels[k] = is_smooth(k) and max(0, capacity(k) - used[k] * MINUTE) or 0
  end
end

local function read_quota(at)
  local quota = {}
  for i = 1, 5 do quota[i] = tonumber(ARGV[at + i - 1]) end
  return quota
end

local function open_one(id, holder, tokens, spent, start)
  call('HSET', OPEN, id, cmsgpack.pack({holder, tokens, spent, now, start}))
end

local function close(id, entry, requests, spent)
  call('HDEL', OPEN, id)
  account.mean_open = account.mean_open + floor((now - entry[4] - account.mean_open) / MEMORY)
  local unused = entry[2] - spent
  if entry[5] > 0 and (unused > 0 or requests == 0) then add(find_slot(entry[5]), {requests - 1, -max(unused, 0)}) end
  if unused < 0 then record(0, -unused) end
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
    if not alive[holder] then close(all[i], entry, 1, entry[3]) end
  end
end

local function has_room(costs, hold)
  for k = 1, 2 do
    if limit(k) > 0 and costs[k] > 0 and used[k] + costs[k] > limit(k) then return false end
  end
  if not account.places[1] then return true end
  return max(first_fit(1, costs[1], now, hold), first_fit(2, costs[2], now, hold)) == now
end

local function may_open(came_as_told)
  local concurrency = account.quota[5]
  return concurrency == 0 or num_open() + (came_as_told and 0 or num_due()) < concurrency
end

local function why(costs)
  local short, is_paced = nil, 0
  for k = 1, 2 do
    if limit(k) > 0 and costs[k] > 0 and used[k] + costs[k] > limit(k) then short = k end
  end
  if not short and account.places[1] then
    for k = 1, 2 do
      if first_fit(k, costs[k], now, 0) > now then short = k end
    end
  end
  if not short then
    for k = 1, 2 do
      if not pace_has_room(k, costs[k]) then short, is_paced = k, 1 end
    end
  end
  if not short then return {0, 'concurrency', 0, 0, account.quota[5], num_open(), 0, 0} end
  return {0, REASONS[short], 0, 0, limit(short), used[short], account.kept[short], is_paced}
end

local function due_time(costs, reason, quantum)
  local due = now + quantum
  if reason == 'concurrency' and account.quota[5] > 0 then
    due = max(due, now + floor(account.mean_open * (1 + #account.places) / account.quota[5]))
  end
  for k = 1, 2 do
    if is_smooth(k) and costs[k] > 0 then
      local missing = min(capacity(k), costs[k] * MINUTE) + account.kept[k] * MINUTE - account.levels[k]
      if missing > 0 then due = max(due, now + ceil_div(missing, limit(k))) end
    end
  end
  while true do
    due = now + ceil_div(due - now, quantum) * quantum
    local fits_from = max(first_fit(1, costs[1], due, GRACE), first_fit(2, costs[2], due, GRACE))
    if fits_from == due then return due end
    due = fits_from
  end
end

local function keep(place)
  if #account.places >= MAX_PLACES or (limit(1) > 0 and account.kept[1] >= limit(1)) then return end
  local held = account.kept[2] + place[4]
  if limit(2) == 0 or account.kept[2] == 0 or held * KEPT_SHARES[account.quota[4]] <= limit(2) then insert(place) end
end

local function reserve(id, holder, quantum, tokens, caller)
  local costs = {1, tokens}
  local own = remove(caller)
  local covers = own and tokens <= own[4]
  local came_as_told = covers and own[1] - EARLY <= now
  local room = has_room(costs, 0)
  if room and not came_as_told then room = pace_has_room(1, 1) and pace_has_room(2, tokens) end
  if room and may_open(came_as_told) then
    if own and own[4] > 0 and tokens == 0 then insert(own) end
    local start = record(1, tokens)
    open_one(id, holder, tokens, 0, start)
    return {1, whole(start), whole(now)}
  end
  if limit(2) > 0 and tokens > limit(2) then return {0, 'too_large_for_limit', 0, 0, limit(2), 0, 0, 0} end
  local answer = why(costs)
  if covers and now < own[1] then
    insert(own)
    answer[3], answer[4] = own[1] - now, came_as_told and 1 or 0
  elseif came_as_told and room and has_room(costs, GRACE) then
    insert({now, caller, 1, tokens})
    answer[3], answer[4] = quantum, 1
  elseif caller ~= NOBODY then
    local due = due_time(costs, answer[2], quantum)
    keep({due, caller, 1, tokens})
    answer[3] = due - now
  end
  return answer
end

local function recall(start, newest, requests, tokens)
  if newest + MINUTE <= now then return end
  local slots, i = account.slots, 1
  while slots[i] and slots[i] < start do i = i + 4 end
  if slots[i] ~= start then
    for _, number in ipairs({0, 0, newest, start}) do table.insert(slots, i, number) end
  end
  slots[i + 1] = max(slots[i + 1], newest)
  slots[i + 2], slots[i + 3] = slots[i + 2] + requests, slots[i + 3] + tokens
end

if op == 'beat' then
  -- Asked here: a process whose connection was replaced unnoticed would name a run that is over.
  local run = string.match(call('INFO', 'server'), 'run_id:(%w+)')
  if call('HGET', SINCE, 'run') ~= run then
    call('DEL', HOLDERS)
    call('HSET', SINCE, 'run', run, 'since', whole(now), 'trusted', whole(now + tonumber(ARGV[5])))
  end
  local is_known = call('HEXISTS', HOLDERS, ARGV[3])
  call('HSET', HOLDERS, ARGV[3], whole(now + tonumber(ARGV[4])))
  call('EXPIRE', HOLDERS, 86400)
  return {is_known}
end

load()
local id = ARGV[3]
if op == 'recall' then
  if not account then begin() end
  for i = 3, #ARGV, 4 do
    recall(tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]))
  end
  save()
  return {1}
end

local packed = account and call('HGET', OPEN, id)
local entry = packed and cmsgpack.unpack(packed)

if op == 'reserve' then
  local quantum, quota = tonumber(ARGV[10]), read_quota(5)
  local trusted = tonumber(call('HGET', SINCE, 'trusted') or now + quantum)
  if now < trusted and quota[1] + quota[2] > 0 then return {0, 'limiter_unavailable', trusted - now, 0, 0, 0, 0, 0} end
  set_up(quota)
  sweep()
  local answer = reserve(id, ARGV[4], quantum, tonumber(ARGV[11]), tonumber(ARGV[12]))
  save()
  return answer
elseif op == 'restore' then
  if entry then return {0} end
  set_up(read_quota(5))
  open_one(id, ARGV[4], tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13]))
elseif not entry then
  return {0}
elseif op == 'progress' then
  entry[3] = tonumber(ARGV[4])
  call('HSET', OPEN, id, cmsgpack.pack(entry))
elseif op == 'settle' then
  advance()
  close(id, entry, 1, tonumber(ARGV[4]))
elseif op == 'release' then
  advance()
  close(id, entry, 0, 0)
end
save()
return {1}

"""What happens on the server in one step: Lua scripts that keep entries, index and byte counter together.

Every script gets the bucket's byte counter as its one key; the other keys of the bucket begin like it:

    <base>:bytes     bytes of all entries         <base>:index   sorted set: one member per entry, in the order of names
    <base>:e:<name>  an entry's head              <base>:age     sorted set of names by the time they were written
    <base>:c:<name>  somebody is writing it       <base>:due     sorted set of the names that expire, by when

A member of the index is `name size expires changed token.head.part`: `expires` in milliseconds since the epoch, 0
for never, `changed` in seconds. A space sorts before every character of a name, so members are in the order of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from typing import Final

UPLOAD_MILLISECONDS: Final = 120_000  # parts that are never published live this long
ALWAYS: Final = -1  # an allowance without end
PRESENT, OWN, OTHERS = 0, 1, 2  # answers to a claim


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and the digest by which a server knows it."""

    text: str

    @property
    def digest(self) -> str:
        """The SHA-1 that `EVALSHA` takes."""
        return sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_COMMON = """
local base = string.sub(KEYS[1], 1, -7)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function head_of(name) return base .. ':e:' .. name end

local function member_of(name)
    return redis.call('ZRANGEBYLEX', base .. ':index', '[' .. name .. ' ', '(' .. name .. '!')[1]
end

local function parsed(member)
    local name, size, expires, changed, token, head, part =
        string.match(member, '^(%S+) (%d+) (%d+) ([%d.]+) (%x+)%.(%d+)%.(%d+)$')
    local parts = math.ceil((size - head) / part)
    return {name = name, size = tonumber(size), expires = tonumber(expires), changed = changed,
            token = token, head = head, part = part, parts = parts}
end

local function part_keys(name, token, parts)
    local keys, front = {}, head_of(name) .. ':' .. token .. ':'
    for i = 1, parts do keys[i] = front .. i end
    return keys
end

-- A call from Lua costs more than what it does here, so some hundred keys in each, of the 8,000 that Lua's stack holds;
-- while a slot moves from node to node several at once may be refused.
local function on_all(verb, keys)
    local sum = 0
    for i = 1, #keys, 500 do
        local last = math.min(#keys, i + 499)
        local reply = redis.pcall(verb, unpack(keys, i, last))
        if type(reply) == 'number' then
            sum = sum + reply
        else
            for n = i, last do sum = sum + redis.call(verb, keys[n]) end
        end
    end
    return sum
end

local function unlink_parts(name, token, parts) on_all('UNLINK', part_keys(name, token, parts)) end

local function leave_books(member, entry)
    redis.call('ZREM', base .. ':index', member)
    redis.call('ZREM', base .. ':age', entry.name)
    redis.call('ZREM', base .. ':due', entry.name)
    redis.call('DECRBY', KEYS[1], entry.size)
end

local function forget(name)
    local there = redis.call('UNLINK', head_of(name))
    local member = member_of(name)
    if member then
        local entry = parsed(member)
        unlink_parts(name, entry.token, entry.parts)
        leave_books(member, entry)
    else
        redis.call('ZREM', base .. ':age', name)
        redis.call('ZREM', base .. ':due', name)
    end
    return there
end

local function forget_due(most)
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', base .. ':due', '-inf', now, 'LIMIT', 0, most)) do
        forget(name)
    end
end
"""

COMMIT: Final = Script(
    _COMMON
    + """
-- name, head with its envelope, size, token, head bytes, part bytes, expires, allowance, if_absent, claim, channel
local name, content, size, token, head, part, expires = unpack(ARGV)
size, expires = tonumber(size), tonumber(expires)
local allowance, if_absent, claim, channel = tonumber(ARGV[8]), ARGV[9], ARGV[10], ARGV[11]
local parts = math.ceil((size - head) / part)
local claimed = base .. ':c:' .. name
if claim ~= '' and redis.call('GET', claimed) == claim then redis.call('UNLINK', claimed) end
forget_due(20)
local older = member_of(name)
if older and parsed(older).token == token then return {1, size} end  -- asked twice, for the answer was lost
if if_absent == '1' and older and redis.call('EXISTS', head_of(name)) == 1 then
    unlink_parts(name, token, parts)
    return {0, parsed(older).size}
end
local keys = part_keys(name, token, parts)
local lost = parts - on_all('EXISTS', keys)
if lost > 0 then
    unlink_parts(name, token, parts)
    return redis.error_reply('KVTLOST ' .. lost .. ' of ' .. parts .. ' parts were gone before the entry was whole')
end
if allowance >= 0 then
    local growth = size - (older and parsed(older).size or 0)
    if size > allowance then
        unlink_parts(name, token, parts)
        return redis.error_reply('KVTFULL ' .. size .. ' bytes, of ' .. allowance .. ' allowed')
    end
    local over = tonumber(redis.call('GET', KEYS[1]) or '0') + growth - allowance
    while over > 0 do
        local oldest = redis.call('ZRANGE', base .. ':age', 0, 1)
        local victim = oldest[1] == name and oldest[2] or oldest[1]
        if not victim then break end
        local before = tonumber(redis.call('GET', KEYS[1]) or '0')
        forget(victim)
        over = over - (before - tonumber(redis.call('GET', KEYS[1]) or '0'))
    end
end
if expires > 0 and expires <= now then
    unlink_parts(name, token, parts)
    forget(name)
    return {1, size}
end
if expires > 0 then
    redis.call('SET', head_of(name), content, 'PXAT', expires)
else
    redis.call('SET', head_of(name), content)
end
if older then
    local entry = parsed(older)
    unlink_parts(name, entry.token, entry.parts)
    leave_books(older, entry)
end
for _, key in ipairs(keys) do
    if expires > 0 then redis.call('PEXPIREAT', key, expires) else redis.call('PERSIST', key) end
end
local whole = function(number) return string.format('%.0f', number) end
local shape = table.concat({token, head, part}, '.')
local member = table.concat({name, whole(size), whole(expires), string.format('%.3f', now / 1000), shape}, ' ')
redis.call('ZADD', base .. ':index', 0, member)
redis.call('ZADD', base .. ':age', whole(now), name)
if expires > 0 then redis.call('ZADD', base .. ':due', whole(expires), name) end
redis.call('INCRBY', KEYS[1], whole(size))
redis.call('PUBLISH', channel, name)
return {1, size}
"""
)

CLAIM: Final = Script(
    _COMMON
    + """
-- name, claim, milliseconds: 0 and the size if the entry is there, 1 if the claim is the caller's, 2 if another's
if redis.call('EXISTS', head_of(ARGV[1])) == 1 then
    local member = member_of(ARGV[1])
    if member then return {0, parsed(member).size} end
end
local key = base .. ':c:' .. ARGV[1]
if redis.call('SET', key, ARGV[2], 'NX', 'PX', ARGV[3]) then return {1, 0} end
if redis.call('GET', key) == ARGV[2] then
    redis.call('PEXPIRE', key, ARGV[3])
    return {1, 0}
end
return {2, 0}
"""
)

UNCLAIM: Final = Script(
    _COMMON
    + """
-- name, claim
local key = base .. ':c:' .. ARGV[1]
if redis.call('GET', key) == ARGV[2] then redis.call('UNLINK', key) end
return 1
"""
)

DELETE: Final = Script(
    _COMMON
    + """
-- names: one character each, 1 if it was there
local found = {}
for i, name in ipairs(ARGV) do found[i] = forget(name) end
return table.concat(found)
"""
)

DROP: Final = Script(
    _COMMON
    + """
-- name, token: drop the entry if its head is still the one with this token; a part of it is gone
local token = redis.call('GETRANGE', head_of(ARGV[1]), 4, 19)
if token ~= '' and token ~= ARGV[2] then return 0 end
return forget(ARGV[1])
"""
)

STAT: Final = Script(
    _COMMON
    + """
-- names: one line each, empty if it is not there
local lines = {}
for i, name in ipairs(ARGV) do
    local member = member_of(name)
    lines[i] = member and redis.call('EXISTS', head_of(name)) == 1 and member or ''
end
return table.concat(lines, '\\n')
"""
)

EXPIRE: Final = Script(
    _COMMON
    + """
-- name, expires, name, expires ...
for i = 1, #ARGV, 2 do
    local name, expires = ARGV[i], tonumber(ARGV[i + 1])
    local member = member_of(name)
    if member and redis.call('EXISTS', head_of(name)) == 1 then
        local entry = parsed(member)
        local keys = part_keys(name, entry.token, entry.parts)
        keys[#keys + 1] = head_of(name)
        for _, key in ipairs(keys) do
            if expires > 0 then redis.call('PEXPIREAT', key, ARGV[i + 1]) else redis.call('PERSIST', key) end
        end
        redis.call('ZREM', base .. ':index', member)
        local size = string.format('%.0f', entry.size)
        local shape = table.concat({entry.token, entry.head, entry.part}, '.')
        local fields = {name, size, ARGV[i + 1], entry.changed, shape}
        redis.call('ZADD', base .. ':index', 0, table.concat(fields, ' '))
        if expires > 0 then
            redis.call('ZADD', base .. ':due', ARGV[i + 1], name)
        else
            redis.call('ZREM', base .. ':due', name)
        end
    end
end
return 1
"""
)

LIST: Final = Script(
    _COMMON
    + """
-- least member, how many: the count looked at, the last one, those whose head is there, the names of the others, time
local members = redis.call('ZRANGEBYLEX', base .. ':index', ARGV[1], '+', 'LIMIT', 0, ARGV[2])
local there, gone = {}, {}
for _, member in ipairs(members) do
    local name = string.sub(member, 1, string.find(member, ' ', 1, true) - 1)
    if redis.call('EXISTS', head_of(name)) == 1 then
        there[#there + 1] = member
    else
        gone[#gone + 1] = name
    end
end
return {#members, members[#members] or '', table.concat(there, '\\n'), table.concat(gone, ' '), now}
"""
)

TIDY: Final = Script(
    _COMMON
    + """
-- names that the index has and that may be gone, by expiry or by the server's own eviction: forget those that are
local gone = 0
for _, name in ipairs(ARGV) do
    if redis.call('EXISTS', head_of(name)) == 0 then
        forget(name)
        gone = gone + 1
    end
end
forget_due(1000)
return gone
"""
)

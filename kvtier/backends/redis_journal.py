"""Logs beside the entries on a server, in the order they were begun, and their owners' signs of life."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING, Final

from kvtier.backends.redis_faults import text_of
from kvtier.backends.redis_scripts import UPLOAD_MILLISECONDS, Script
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backends.redis_control import Control

LIVE_MILLISECONDS: Final = 60_000  # an owner that says nothing for this long is taken for dead
LONGEST_LOG: Final = 4 << 20  # then the owner begins another one, and gives up the one before
PIECE_BYTES: Final = 1 << 20

# The key of every script is <base>:logs, a sorted set of logs, `<owner>/<number>`, by the time they were begun. Beside
# it: <base>:log:<log> the records, <base>:live:<owner> a sign of life, <base>:news a counter of changes.
_COMMON = """
local base = string.sub(KEYS[1], 1, -6)
local function content_of(log) return base .. ':log:' .. log end
local function owner_of(log) return string.match(log, '^[^/]+') end
local function alive(owner)
    redis.call('SET', base .. ':live:' .. owner, '1', 'PX', ARGV[2])
end
local function enter(log)
    local time = redis.call('TIME')
    redis.call('ZADD', KEYS[1], string.format('%.0f', time[1] * 1000000 + time[2]), log)
end
local function leave(log)
    redis.call('ZREM', KEYS[1], log)
    redis.call('UNLINK', content_of(log))
end
local function all() return redis.call('ZRANGE', KEYS[1], 0, -1) end
"""

APPEND: Final = Script(
    _COMMON
    + """
-- owner, milliseconds, log, records, log to give up
alive(ARGV[1])
if not redis.call('ZSCORE', KEYS[1], ARGV[3]) then enter(ARGV[3]) end
local size = redis.call('APPEND', content_of(ARGV[3]), ARGV[4])
if ARGV[5] ~= '' then leave(ARGV[5]) end
redis.call('INCR', base .. ':news')
return size
"""
)

OPEN_LOGS: Final = Script(
    _COMMON
    + """
-- owner, milliseconds: the logs of this owner and of those that are gone
alive(ARGV[1])
local found = {}
for _, log in ipairs(all()) do
    local owner = owner_of(log)
    if owner == ARGV[1] or redis.call('EXISTS', base .. ':live:' .. owner) == 0 then found[#found + 1] = log end
end
return found
"""
)

REPLACE: Final = Script(
    _COMMON
    + """
-- owner, milliseconds, new log, then each log that was read and how much of it
alive(ARGV[1])
local new, read = content_of(ARGV[3]), {}
redis.call('PERSIST', new)
for i = 4, #ARGV, 2 do read[ARGV[i]] = tonumber(ARGV[i + 1]) end
for _, log in ipairs(all()) do
    if owner_of(log) == ARGV[1] then
        redis.call('APPEND', new, redis.call('GETRANGE', content_of(log), read[log] or 0, -1))
        leave(log)
    elseif read[log] then
        leave(log)
    end
end
enter(ARGV[3])
redis.call('INCR', base .. ':news')
return redis.call('STRLEN', new)
"""
)

FOLLOW: Final = Script(
    _COMMON
    + """
-- owner, milliseconds, number of the last news, 1 for contents, then each log of others and how far it was heard
alive(ARGV[1])
local news = redis.call('GET', base .. ':news') or '0'
if news == ARGV[3] then return {news} end
local heard, found = {}, {news}
for i = 5, #ARGV, 2 do heard[ARGV[i]] = tonumber(ARGV[i + 1]) end
for _, log in ipairs(all()) do
    if owner_of(log) ~= ARGV[1] then
        found[#found + 1] = log
        found[#found + 1] = redis.call('STRLEN', content_of(log))
        found[#found + 1] = ARGV[4] == '1' and redis.call('GETRANGE', content_of(log), heard[log] or 0, -1) or ''
    end
end
return found
"""
)


class RedisJournal:
    """One open backend's log and the logs of those that are gone; calls take turns.

    Args:
        control: of the server.
        group: the index of the journal's key among the control's groups.
        base: what the journal's keys begin with.
    """

    def __init__(self, control: Control, group: int, base: str) -> None:
        self._control = control
        self._group = group
        self._base = base
        self._owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._number = 0
        self._before = ""  # a log that was full, and is given up when the one after it is full too
        self._read_sizes: dict[str, int] = {}
        self._heard: dict[str, int] | None = None
        self._news = ""
        self._turns: asyncio.Lock = asyncio.Lock()

    async def append(self, records: bytes) -> None:
        """Append whole records; raises `BackendError`."""
        async with self._turns:
            size = await self._script(APPEND, self._log, records, "")
            if isinstance(size, int) and size > LONGEST_LOG:
                before, self._before = self._before, self._log
                self._number += 1
                if before:
                    await self._script(APPEND, self._log, b"", before)

    async def read(self) -> list[bytes]:
        """Return this log and those whose owners are gone, oldest first; raises `BackendError`."""
        async with self._turns:
            logs = _texts(await self._script(OPEN_LOGS))
            contents = [await self._control.command(self._group, "GET", self._content(log)) for log in logs]
            whole = [content if isinstance(content, bytes) else b"" for content in contents]
            self._read_sizes = {log: len(content) for log, content in zip(logs, whole, strict=True)}
            return whole

    async def replace(self, records: bytes) -> None:
        """Put `records` in place of what `read` returned; raises `BackendError`."""
        async with self._turns:
            self._number += 1
            new = self._content(self._log)
            await self._control.command(self._group, "SET", new, b"", "PX", UPLOAD_MILLISECONDS)
            for start in range(0, len(records), PIECE_BYTES):
                await self._control.command(self._group, "APPEND", new, records[start : start + PIECE_BYTES])
            words = [word for log, size in self._read_sizes.items() for word in (log, size)]
            await self._script(REPLACE, self._log, *words)
            self._read_sizes, self._before = {}, ""

    async def follow(self) -> dict[str, bytes]:
        """Return what others appended since the last call, by log; the first call only begins."""
        async with self._turns:
            begun = self._heard is not None
            words = [word for log, size in (self._heard or {}).items() for word in (log, size)]
            reply = await self._script(FOLLOW, self._news, "1" if begun else "0", *words)
            if not isinstance(reply, list) or len(reply) % 3 != 1:
                raise BackendError(f"{self._control.medium}: not the reply of a journal")
            news = text_of(reply[0])
            if news == self._news:
                return {}
            found = [
                (text_of(log), int(size), bytes(more)) for log, size, more in zip(*[iter(reply[1:])] * 3, strict=True)
            ]
            self._news, self._heard = news, {log: size for log, size, _ in found}
            return {log: more for log, _, more in found if more} if begun else {}

    async def end(self) -> None:
        """Say that this owner is gone; its log stays for the next one."""
        await self._control.command(self._group, "UNLINK", f"{self._base}:live:{self._owner}")

    @property
    def _log(self) -> str:
        return f"{self._owner}/{self._number}"

    def _content(self, log: str) -> str:
        return f"{self._base}:log:{log}"

    async def _script(self, script: Script, *words: str | bytes | int) -> object:
        return await self._control.script(self._group, script, self._owner, LIVE_MILLISECONDS, *words)


def _texts(words: object) -> Sequence[str]:
    return [text_of(word) for word in words] if isinstance(words, list) else []

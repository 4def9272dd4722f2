"""Journals as objects: each open backend rewrites a small log of its own, and a marker says who is alive."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier.backends.s3_faults import MISSING, RefusedError
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backends.s3_control import Control, Listed

_LOG = re.compile(r"\d{20}-([0-9a-f]{16})\.log")  # the digits are ns since the epoch: names sort by age
_ALIVE = re.compile(r"([0-9a-f]{16})\.alive")
_ROLL_BYTES = 64 << 10  # an append rewrites the whole log: a longer one goes on in another object
_LONGEST = 64 << 20
_BEAT_SECONDS = 60.0  # how often the marker is renewed
_DEAD_SECONDS = 600.0  # a marker this old belongs to a process that was killed
KEEP_SECONDS = 86_400.0  # how long the logs of others are kept for those who follow them


class Journal:
    """This backend's log and those of others, under `folder`. An object store has no append: a log is put anew.

    Age is judged by the server's clock alone.
    """

    def __init__(self, control: Control, folder: str) -> None:
        self._control = control
        self._folder = folder
        self._owner = secrets.token_hex(8)
        self._stamp = 0
        self._log = ""
        self._content = b""
        self._marked_at = float("-inf")
        self._read_sizes: dict[str, int] = {}  # what `read` last returned: name of the log -> bytes
        self._followed: dict[str, int] | None = None  # how far the logs of others were read
        self._mutex = asyncio.Lock()

    async def append(self, records: bytes) -> None:
        """Append whole records; of an append that fails nobody knows whether it was heard."""
        async with self._mutex:
            await self._append(records)

    async def _append(self, records: bytes) -> None:
        await self._mark()
        if not self._log or len(self._content) + len(records) > _ROLL_BYTES:
            self._log, self._content = self._next_name(), b""
        content = self._content + records
        try:
            await self._control.put(self._folder + self._log, content)
        except BaseException:
            self._log = ""  # it may be there: what follows goes elsewhere
            raise
        self._content = content

    async def read(self) -> list[bytes]:
        """Return this log and those of processes that are gone, oldest first."""
        async with self._mutex:
            logs, alive = await self._listed()
            contents = {}
            for log in logs:
                owner = _owner_of(log.key)
                if owner == self._owner or owner not in alive:
                    with suppress(BackendError):  # compacted away by another process: it is only a hint
                        contents[log.key] = await self._content_of(log.key, 0, log.size)
            self._read_sizes = {name: len(content) for name, content in contents.items()}
            return list(contents.values())

    async def replace(self, records: bytes) -> None:
        """Put `records` in place of what `read` returned; what was appended since follows them."""
        async with self._mutex:
            logs, _ = await self._listed()
            own = [log for log in logs if _owner_of(log.key) == self._owner]
            since = [await self._content_of(log.key, self._read_sizes.get(log.key, 0), log.size) for log in own]
            self._log = ""
            await self._append(b"".join([records, *since]))
            doomed = {*self._read_sizes, *(log.key for log in own)}
            self._read_sizes = {}
            for error in await self._control.delete([self._folder + name for name in doomed]):
                if error is not None:
                    raise error

    async def follow(self) -> dict[str, bytes]:
        """Return what others appended to their logs since the last call, by log; the first call only begins."""
        heard: dict[str, bytes] = {}
        async with self._mutex:
            if self._log:
                await self._mark()
            before = self._followed
            followed: dict[str, int] = {}
            for log in (await self._listed())[0]:
                if _owner_of(log.key) == self._owner:
                    continue
                start = log.size if before is None else before.get(log.key, 0)
                more = b""
                if log.size > start:
                    more = await self._content_of(log.key, start, log.size)
                followed[log.key] = start + len(more)
                if more:
                    heard[log.key] = more
            self._followed = followed
        return heard

    async def outdated(self) -> list[str]:
        """Return the full keys of logs and markers that are nobody's any more."""
        listed = await self._pages()
        oldest = self._control.now() - KEEP_SECONDS
        return [self._folder + item.key for item in listed if item.changed < oldest and self._owner not in item.key]

    async def close(self) -> None:
        """Say that this log has ended; it stays for others to read."""
        async with self._mutex:
            if self._marked_at > 0:
                await self._control.delete([f"{self._folder}{self._owner}.alive"])

    async def _mark(self) -> None:
        """Put or renew the marker: while it is young, nobody takes this log for an ended one."""
        if time.monotonic() - self._marked_at >= _BEAT_SECONDS:
            await self._control.put(f"{self._folder}{self._owner}.alive", b"")
            self._marked_at = time.monotonic()

    async def _pages(self) -> list[Listed]:
        listed: list[Listed] = []
        more = True
        while more:
            page, more = await self._control.list_page(self._folder, after=listed[-1].key if listed else "")
            listed += page
            more = more and bool(page)
        return listed

    async def _listed(self) -> tuple[Sequence[Listed], set[str]]:
        """Return the logs, oldest first, and the owners that are alive."""
        listed = await self._pages()
        logs = [item for item in listed if _LOG.fullmatch(item.key)]
        markers = [(item, match[1]) for item in listed if (match := _ALIVE.fullmatch(item.key))]
        now = self._control.now()
        return logs, {owner for item, owner in markers if now - item.changed < _DEAD_SECONDS}

    async def _content_of(self, name: str, start: int, end: int) -> bytes:
        """Return a log's bytes from `start` to `end`, or what there is; a log that is gone has none."""
        if end <= start:
            return b""
        try:
            return await self._control.get_bytes(self._folder + name, start=start, most=min(end - start, _LONGEST))
        except RefusedError as exc:
            if exc.code in MISSING:
                return b""
            raise

    def _next_name(self) -> str:
        self._stamp = max(time.time_ns(), self._stamp + 1)
        return f"{self._stamp:020d}-{self._owner}.log"


def _owner_of(name: str) -> str:
    match = _LOG.fullmatch(name)
    return match[1] if match else ""

"""Entries read and written whole: what readers and writers of one name do about each other."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.backends.base import Read, TooLongError, Write, Written
from kvtier.backends.redis_faults import SpoiltError, listed, spoilt, text_of
from kvtier.backends.redis_lanes import Publication, Wanted
from kvtier.backends.redis_layout import Keys, Shape, cut
from kvtier.backends.redis_scripts import CLAIM, DROP, OTHERS, PRESENT, STAT, UNCLAIM
from kvtier.backends.redis_wire_path import deadline_in
from kvtier.backends.views import host_view, total_bytes, writable_views
from kvtier.errors import BackendError, BackendTimeoutError, RacedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.redis_control import Control
    from kvtier.backends.redis_wire_path import Path

MOST_RACES: Final = 16  # times that a value is replaced under one reader before it gives up
CLAIM_BYTES: Final = 4 << 10  # less is sent rather than asked about
CLAIM_MILLISECONDS: Final = 3_000  # a writer that died is waited for this long
LOOK_SECONDS: Final = 0.02
ABANDON_SECONDS: Final = 1.0
READ_SHARE: Final = 0.95  # of the tier's deadline: the answer should be in time


class Entries:
    """Reads and writes of one open backend.

    Args:
        path: moves the bytes.
        control: for everything small.
        keys: of the entries.
        part_bytes: the longest part of a new entry.
        seconds: the deadline of one read or write.
        allowance: returns how many bytes the bucket of a name may hold.
    """

    def __init__(
        self,
        path: Path,
        control: Control,
        keys: Keys,
        *,
        part_bytes: int,
        seconds: float,
        allowance: Callable[[int], int],
    ) -> None:
        self._path = path
        self._control = control
        self._keys = keys
        self._part_bytes = part_bytes
        self._seconds = seconds * READ_SHARE
        self._allowance = allowance

    async def read(self, read: Read) -> int | None:
        """Fill the buffers; return how much, `None` for a miss.

        What is nothing of ours reads as no bytes: that fails every verification, and so the tier drops it.

        Raises:
            TooLongError, RacedError, BackendError: as the contract says.
        """
        try:
            return await self._read(read)
        except SpoiltError:
            return 0

    async def _read(self, read: Read) -> int | None:
        views = writable_views(read.into)
        wanted = Wanted(views, read.offset, total_bytes(views), read.partial)
        deadline = deadline_in(self._seconds)
        lost = ""
        for _ in range(MOST_RACES):
            shape, whole = await self._path.fetch(read.name, wanted, deadline)
            if shape is None:
                return None
            if not wanted.fits(shape):
                if await self._is_indexed(read.name, shape):
                    raise TooLongError(shape.size)
                if shape.token == lost:
                    raise spoilt(read.name)
                lost = shape.token
                continue
            if whole:
                return wanted.stop(shape) - wanted.offset
            if shape.token == lost:  # the server evicted a part: the rest is worth nothing
                await self._control.script(self._keys.bucket(read.name), DROP, read.name, shape.token)
                return None
            lost = shape.token
        raise RacedError(f"{read.name} was replaced {MOST_RACES} times while it was read")

    async def _is_indexed(self, name: str, shape: Shape) -> bool:
        """Tell whether the index has this very value, or nothing: else somebody put another head in its place."""
        words = text_of(await self._control.script(self._keys.bucket(name), STAT, name)).split()
        cut_as = f"{shape.token}.{shape.head}.{shape.part}"
        return not words or (words[1] == str(shape.size) and words[-1] == cut_as)

    async def write(self, write: Write) -> Written:
        """Publish an entry; raises `BackendError`."""
        views = [host_view(part) for part in write.parts]
        shape = cut(total_bytes(views), self._part_bytes)
        deadline = deadline_in(self._seconds)
        claim = ""
        if write.if_absent and shape.size > CLAIM_BYTES:
            present = await self._claim(write.name, shape.token, deadline)
            if present is not None:
                return Written(present, stored=False)
            claim = shape.token
        expires = "0" if write.expires is None else str(max(1, int(write.expires * 1000)))
        allowance = str(self._allowance(self._keys.bucket(write.name)))
        words = [expires, allowance, "1" if write.if_absent else "0", claim, self._keys.arrivals]
        publication = Publication(write.name, shape, views, words)
        try:
            stored, size = await self._path.publish(publication, deadline)
        except BaseException:
            # Asked for, it may have happened all the same; parts that are not published vanish by themselves.
            if shape.parts and not publication.asked:
                await self._abandon(write.name, shape, claim)
            raise
        return Written(size, stored=bool(stored))

    async def _claim(self, name: str, claim: str, deadline: float) -> int | None:
        """Take the right to write a new entry, or wait for whoever has it: return the size of what is there then.

        However many processes write one new entry at once, its bytes come over the wire once; twice if the first
        writer dies.
        """
        bucket = self._keys.bucket(name)
        pause = LOOK_SECONDS
        while True:
            reply = await self._control.script(bucket, CLAIM, name, claim, CLAIM_MILLISECONDS)
            state, size = listed(reply, 2)
            if state != OTHERS:
                return int(size) if state == PRESENT else None
            if time.monotonic() + pause >= deadline:
                raise BackendTimeoutError(f"{self._control.medium}: another process is still writing {name}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 8 * LOOK_SECONDS)

    async def _abandon(self, name: str, shape: Shape, claim: str) -> None:
        """Take back what was uploaded; it would vanish by itself later."""
        bucket = self._keys.bucket(name)
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(ABANDON_SECONDS):
                await self._control.command(bucket, "UNLINK", *self._keys.parts(name, shape))
                if claim:
                    await self._control.script(bucket, UNCLAIM, name, claim)

"""One immutable chunk in memory: a parsed header and the arena slot that holds its bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.chunk.container import seal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.buffers.arena import Slot
    from kvtier.chunk.container import Header
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.concurrency.workers import Workers


class Value:
    """A chunk's bytes as a container: room for the sealed header, then the payload, in one slot.

    A Value owns nothing by itself: who keeps one calls `retain`, who drops it calls `release`, and the slot goes
    back to the arena with the last reference. Its payload never changes once made.
    """

    __slots__ = ("_sealing", "fits", "header", "owners", "payload_offset", "sealed", "size", "slot")

    def __init__(self, header: Header, slot: Slot, *, payload_offset: int, size: int, sealed: bool) -> None:
        self.header: Header = header
        self.slot: Slot = slot
        self.payload_offset: int = payload_offset
        self.size: int = size  # bytes of the whole container
        self.sealed: bool = sealed
        self.owners: int = 0  # memory tiers that keep it: two of them may, in one slot
        self.fits: tuple[Sequence[SegmentSpec], int] | None = None  # shapes and position it was last found to have
        self._sealing: asyncio.Lock | None = None

    @property
    def key(self) -> str:
        """The chunk's key."""
        return self.header.key

    def retain(self) -> Value:
        """Add one reference."""
        self.slot.retain()
        return self

    def release(self) -> None:
        """Drop one reference."""
        self.slot.release()

    @property
    def shared(self) -> bool:
        """Whether somebody beside its owners holds it (a lease, a reader, a queued write)."""
        return self.slot.references > max(1, self.owners)

    def views(self) -> list[memoryview]:
        """Return each segment's stored bytes, borrowed: valid while the caller holds a reference."""
        base = self.payload_offset
        return [self.slot.view(base + segment.offset, segment.stored) for segment in self.header.segments]

    def owned_views(self) -> list[memoryview]:
        """Return each segment's stored bytes; each view, and every tensor over it, keeps the slot alive."""
        base = self.payload_offset
        return [self.slot.owned_view(base + segment.offset, segment.stored) for segment in self.header.segments]

    def container(self) -> memoryview:
        """Return the whole container as one borrowed view; `seal` first."""
        return self.slot.view(0, self.size)

    async def seal(self, workers: Workers) -> None:
        """Checksum the payload and write the header into the slot, in a thread; done once, whoever asks first."""
        if self.sealed:
            return
        if self._sealing is None:
            self._sealing = asyncio.Lock()
        async with self._sealing:
            if not self.sealed:
                self.header = await workers.run_background(self._write_header)
                self.sealed = True

    def _write_header(self) -> Header:
        return seal(self.container(), self.header, payload_offset=self.payload_offset, size=self.size)

"""What the store lends its tiers: memory, threads, clocks and the closed set of codecs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.codecs.chain import Scratch
from kvtier.concurrency.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.buffers.arena import Arena
    from kvtier.codecs.base import Codec
    from kvtier.concurrency.clock import Clock
    from kvtier.concurrency.supervisor import Supervisor
    from kvtier.concurrency.workers import Workers
    from kvtier.events import Events


class ScratchPerThread(threading.local):
    """The codec buffers of the thread that asks."""

    def __init__(self) -> None:
        self.scratch: Scratch = Scratch()
        self._decoded = bytearray()

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return one view per size, 64-byte aligned to each other; what an earlier call returned is given up."""
        total = sum(-(-size // 64) * 64 for size in sizes)
        if len(self._decoded) < total:
            self._decoded = bytearray(total)
        whole, views, start = memoryview(self._decoded), [], 0
        for size in sizes:
            views.append(whole[start : start + size])
            start += -(-size // 64) * 64
        return views


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Shared by all tiers of one store."""

    clock: Clock
    events: Events
    supervisor: Supervisor
    workers: Workers  # threads for copying, hashing and codecs: jobs that end by themselves
    arena: Arena
    codecs: Mapping[str, type[Codec]]  # the only names that an entry's header may mention
    pace: Pace = field(default_factory=Pace)  # for steps of the background class
    buffers: ScratchPerThread = field(default_factory=ScratchPerThread)

    def load_codec(self, name: str) -> type[Codec]:
        """Return the class of a codec this store knows; headers were checked against the same names."""
        return self.codecs[name]

    @property
    def scratch(self) -> Scratch:
        """Codec buffers of the calling thread."""
        return self.buffers.scratch

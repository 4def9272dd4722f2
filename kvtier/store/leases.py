"""Leases: zero-copy views over cached chunks, kept in memory for a scope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.buffers.slot import release_all
from kvtier.chunk.tensors import tensor_at, tensor_over
from kvtier.errors import CodecError
from kvtier.store.damage import drop_undecodable
from kvtier.store.fitting import Fitting
from kvtier.store.loads import Loads, touch
from kvtier.tier.encode import decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvtier.buffers.lease import Hold
    from kvtier.chunk.layout import KVLayout
    from kvtier.chunk.segments import Segment
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.store.plan import Piece
    from kvtier.store.prefixes import Cached
    from kvtier.tier.value import Value


class LeasedChunk:
    """One chunk in place: tokens [start, stop) of one layer group, as views of the store's memory; for reading only.

    Attributes:
        group: name of the layer group.
        start: position of its first token.
        stop: position behind its last token.
    """

    __slots__ = ("_memory", "_value", "group", "start", "stop")

    def __init__(self, group: str, start: int, stop: int, value: Value, memory: memoryview) -> None:
        self.group: str = group
        self.start: int = start
        self.stop: int = stop
        self._value = value
        self._memory = memory  # keeps every slot of the lease until it and the tensors over it are gone

    @property
    def kv(self) -> Mapping[str, torch.Tensor]:
        """All tensors of the chunk, as the layout shapes them."""
        return {segment.spec.name: self._tensor(segment) for segment in self._value.header.segments}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor of the chunk; it stays valid as long as it lives. KeyError for an unknown name."""
        for segment in self._value.header.segments:
            if segment.spec.name == name:
                return self._tensor(segment)
        raise KeyError(name)

    def _tensor(self, segment: Segment) -> torch.Tensor:
        first = self._value.slot.offset + self._value.payload_offset + segment.offset
        if not segment.raw:
            return tensor_over(self._memory[:0], segment.spec)
        return tensor_at(self._memory, segment.spec, first, segment.raw)

    def __repr__(self) -> str:
        return f"LeasedChunk(group={self.group!r}, start={self.start}, stop={self.stop})"


@dataclass(slots=True, kw_only=True)
class Lease:
    """What `KVStore.lease` yields. The views stay valid as long as they live; the lease ends with its scope.

    Attributes:
        num_tokens: tokens from position 0 that the chunks make usable.
        chunks: full groups first, each in the order of its tokens.
        lossy: whether any chunk went through a lossy codec.
        complete: False if memory, a deadline or a fault cut the run that is cached.
    """

    num_tokens: int
    chunks: tuple[LeasedChunk, ...]
    lossy: bool = False
    complete: bool = True


class Leasing:
    """One lease while it is made: takes chunk after chunk within the lease share, and ends where one is missing."""

    def __init__(self, engine: Engine, layout: KVLayout, cached: Cached, *, start: int, deadline: Deadline) -> None:
        self._engine = engine
        self._fitting = Fitting(engine, layout, cached.plan)
        self._cached = cached
        self._start = start
        self._deadline = deadline
        self._room = engine.leases.room
        self._pieces: list[Piece] = []  # of the length that was tried last
        self._values: dict[Piece, Value] = {}
        self._complete = True
        self.hold: Hold | None = None

    async def take(self) -> Lease:
        """Lease what is usable now; less if the lease share or a deadline ends it."""
        plan = self._cached.plan
        try:
            length = await self._collect()
            pieces = self._pieces if length > self._start else []
            values = [self._values[piece] for piece in pieces]
            self.hold = self._engine.leases.try_take(sum(value.slot.size for value in values))
            if self.hold is None:  # another lease took the room meanwhile
                pieces, values, self._complete = [], [], False
            memory = self._engine.arena.owned_view([value.slot for value in values])
            if self.hold is not None:
                self.hold.cover([memory])
        finally:
            release_all([value.slot for value in self._values.values()])
        touch(self._engine, [plan.key(piece) for piece in pieces])
        return Lease(
            num_tokens=length if pieces else 0,
            chunks=tuple(
                LeasedChunk(piece.group, plan.start(piece.span), plan.stop(piece.span), value, memory)
                for piece, value in zip(pieces, values, strict=True)
            ),
            lossy=any(value.header.lossy for value in values),
            complete=self._complete,
        )

    async def _collect(self) -> int:
        """Hold a reference on every chunk that is usable in the end; return the length. Each round loses a chunk."""
        length = self._cached.usable()
        while length > self._start:
            self._pieces = self._cached.plan.needed(self._start, length)
            lost = await self._read([piece for piece in self._pieces if piece not in self._values])
            if lost is None:
                return length
            self._cached.lose(lost)
            self._complete = False
            length = self._cached.usable()
        return 0

    async def _read(self, pieces: list[Piece]) -> Piece | None:
        """Read the chunks in order; return the first that is not to be had."""
        with Loads(self._engine, [self._cached.where[piece] for piece in pieces]) as loads:
            for i, piece in enumerate(pieces):
                value = loads.at_hand(i) or await loads.value(i, self._deadline)
                if value is None or not self._fitting.fits(piece, value) or value.slot.size > self._room:
                    return piece
                try:
                    plain = await self._decoded(value) if value.header.chain else loads.hand_over(i)
                except TimeoutError:
                    return piece
                except CodecError as exc:
                    drop_undecodable(self._engine, value, exc)
                    return piece
                self._values[piece] = plain
                self._room -= plain.slot.size
        return None

    async def _decoded(self, value: Value) -> Value:
        """Return the value without codecs, with a reference of its own."""
        return await decoded(value, self._engine.services, timeout=self._deadline.remaining())

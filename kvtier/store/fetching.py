"""The way out: chunks from their tiers into one contiguous KV, copied as they arrive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.chunk.transfer import Copies
from kvtier.concurrency.gate import gate_of_call
from kvtier.errors import CodecError
from kvtier.store.copies import deliver_tokens, short_form, to_device
from kvtier.store.damage import drop_undecodable
from kvtier.store.exchange import TensorTarget
from kvtier.store.fitting import Fitting
from kvtier.store.loads import Loads, touch
from kvtier.store.results import Hit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvtier.chunk.layout import KVLayout, LayerGroup
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.store.exchange import Target
    from kvtier.store.plan import Piece
    from kvtier.store.prefixes import Cached
    from kvtier.store.targets import Targets
    from kvtier.tier.value import Value

COPY_JOB_BYTES = 64 << 20  # a cancelled get waits for at most one such copy job


@dataclass(slots=True)
class Fetched:
    """What one get has brought together so far."""

    lossy: bool = False
    complete: bool = True
    tiers: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)  # bytes by tier
    done: set[Piece] = field(default_factory=set)


class Fetching:
    """Fills the targets of one get with [start, length) of a prefix; what fails makes the prefix shorter."""

    def __init__(self, engine: Engine, layout: KVLayout, cached: Cached, *, start: int, deadline: Deadline) -> None:
        self._engine = engine
        self._layout = layout
        self._fitting = Fitting(engine, layout, cached.plan)
        self._cached = cached
        self._start = start
        self._deadline = deadline
        self._gate = gate_of_call()  # before the caller's memory
        self.fetched: Fetched = Fetched()

    def _first(self, group: LayerGroup, length: int) -> int:
        """Return the first position that a result of `length` tokens holds of `group`."""
        return max(self._start, self._cached.plan.window_start(group, length))

    async def fill(self, targets: Targets) -> int:
        """Fill tensors made by `targets`; return the length that came together, 0 if none.

        Each round that comes out shorter lost a chunk, so there is a last one.
        """
        length = self._cached.usable()
        while length > self._start:
            firsts = {group.name: self._first(group, length) for group in self._layout.groups}
            made = await targets.make(self._engine, firsts, length, self._deadline)
            if made is None:
                self.fetched.complete = False
                return 0
            usable = await self._round(made, length)
            if usable >= length:
                return length
            length = usable
            self._restart_windows()
        return 0

    async def hit(self, targets: Targets, length: int, *, device: str | torch.device | None) -> Hit:
        """Return the filled targets as the hit of `length` tokens, on `device` if one is given."""
        kv: Mapping[str, Mapping[str, torch.Tensor]] = targets.result(length)
        if device is not None:
            kv = await self._engine.services.workers.run(to_device, kv, device)
        return Hit(
            num_tokens=length,
            start=self._start,
            kv=short_form(kv),
            lossy=self.fetched.lossy,
            tiers=dict(self.fetched.tiers),
            complete=self.fetched.complete,
            event=targets.event,
        )

    async def _round(self, targets: Mapping[str, Target], length: int) -> int:
        """Fetch what is not done yet; return the length that is usable after it.

        The full groups' tokens stay where they are; the windowed groups of a shorter result begin earlier.
        """
        pieces = [piece for piece in self._cached.plan.needed(self._start, length) if piece not in self.fetched.done]
        with Loads(self._engine, [self._cached.where[piece] for piece in pieces]) as loads:
            await self._take(pieces, loads, targets, length)
            self.fetched.complete = self.fetched.complete and not loads.late
        touch(self._engine, [self._cached.plan.key(piece) for piece in pieces if piece in self.fetched.done])
        return self._cached.usable()

    def _restart_windows(self) -> None:
        """Forget what windowed groups fetched: a shorter prefix ends them elsewhere."""
        windowed = {group.name for group in self._cached.plan.windowed}
        self.fetched.done = {piece for piece in self.fetched.done if piece.group not in windowed}

    async def _take(self, pieces: Sequence[Piece], loads: Loads, targets: Mapping[str, Target], length: int) -> None:
        batch: list[tuple[int, Piece, Value]] = []
        for i, piece in enumerate(pieces):
            if batch and not loads.ready(i):
                await self._copy(batch, loads, targets, length)
            value = await loads.value(i, self._deadline)
            if value is None or not self._fitting.fits(piece, value):
                self._lose(piece)
                continue
            batch.append((i, piece, value))
            if sum(value.size for _, _, value in batch) >= COPY_JOB_BYTES:
                await self._copy(batch, loads, targets, length)
        await self._copy(batch, loads, targets, length)

    def _lose(self, piece: Piece) -> None:
        self._cached.lose(piece)
        self.fetched.complete = False

    async def _copy(
        self, batch: list[tuple[int, Piece, Value]], loads: Loads, targets: Mapping[str, Target], length: int
    ) -> None:
        """Copy what has arrived in one thread job, then give its memory back; empties the batch."""
        if not batch:
            return
        limit = min(length, self._cached.limit)
        items = [item[1:] for item in batch]
        workers = self._engine.services.workers
        if _brief(items, targets, workers.loop_bytes):
            bad = self._deliver(items, targets, limit)
        else:
            bad = await workers.run(self._deliver, items, targets, limit)
        for i, piece, value in batch:
            if piece in bad:
                drop_undecodable(self._engine, value, bad[piece])
                self._lose(piece)
            else:
                self.fetched.done.add(piece)
                self.fetched.lossy = self.fetched.lossy or value.header.lossy
                self.fetched.tiers[loads.source(i)] += 1
                self.fetched.sizes[loads.source(i)] += value.size
            loads.drop(i)
        batch.clear()

    def _deliver(
        self, items: Sequence[tuple[Piece, Value]], targets: Mapping[str, Target], limit: int
    ) -> dict[Piece, CodecError]:
        """Copy each item's tokens to its target; return the items that did not decode, and why."""
        plan = self._cached.plan
        bad: dict[Piece, CodecError] = {}
        copies = Copies()
        with self._gate:
            for piece, value in items:
                target = targets[piece.group]
                first, stop = max(plan.start(piece.span), target.first), min(plan.stop(piece.span), limit)
                try:
                    if first < stop:
                        deliver_tokens(value, self._engine.services, target, first, stop, copies=copies)
                except CodecError as exc:
                    bad[piece] = exc
            copies.run()
        return bad


def _brief(items: Sequence[tuple[Piece, Value]], targets: Mapping[str, Target], most: int) -> bool:
    """Tell whether the copies are plain ones in host memory, and so few bytes that no thread is worth its hops."""
    if sum(value.size for _, value in items) > most or any(value.header.chain for _, value in items):
        return False
    used = [targets[group] for group in {piece.group for piece, _ in items}]
    return all(
        isinstance(target, TensorTarget) and all(tensor.device.type == "cpu" for tensor in target.tensors.values())
        for target in used
    )

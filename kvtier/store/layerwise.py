"""A cached prefix layer by layer: while one layer group is used, the next one loads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvtier.chunk.layout import KVLayout
from kvtier.errors import InvalidValueError
from kvtier.store.fetching import Fetching
from kvtier.store.prefixes import Cached
from kvtier.store.streaming import Part, stream_chunks
from kvtier.store.targets import Targets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    import torch

    from kvtier.chunk.layout import LayerGroup
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine

AHEAD = 2  # layer groups under way or loaded, behind the one that is handed out
# The first group is all that a model waits for: for so long no other takes a share of the medium. A disk has it by
# then; where a round trip takes longer, the wait is for an answer and not for bandwidth, and others cost it little.
HEAD_START_SECONDS = 0.02


class _Loaded(NamedTuple):
    """One layer group: how many tokens of the prefix came together, and their tensors."""

    length: int
    kv: Mapping[str, torch.Tensor]
    lossy: bool


class _GroupLoads:
    """Loads layer groups in the order of their first layers, a few ahead of the one that is wanted."""

    def __init__(
        self, engine: Engine, layout: KVLayout, cached: Cached, *, start: int, length: int, deadline: Deadline
    ) -> None:
        self._engine = engine
        self._cached = cached
        self._axes = layout.axes
        self._start = start
        self._length = length
        self._deadline = deadline
        self._waiting = sorted(layout.groups, key=lambda group: group.layers[0])
        self._tasks: dict[str, asyncio.Task[_Loaded]] = {}

    async def group(self, name: str) -> _Loaded:
        """Return a group once it is loaded; others begin to load when it is, or has had its head start."""
        if name not in self._tasks:
            self._begin()
            await asyncio.wait({self._tasks[name]}, timeout=HEAD_START_SECONDS)
        while self._waiting and len(self._tasks) <= AHEAD:
            self._begin()
        return await asyncio.shield(self._tasks[name])

    def _begin(self) -> None:
        group = self._waiting.pop(0)
        self._tasks[group.name] = asyncio.create_task(self._load(group), name=f"kvtier layers {group.name}")

    def drop(self, name: str) -> None:
        """Forget a group whose layers have all been handed out."""
        del self._tasks[name]

    async def end(self) -> None:
        """Stop what still loads, and wait until it has."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def _load(self, group: LayerGroup) -> _Loaded:
        layout = KVLayout([group], axes=self._axes)
        where = {piece: place for piece, place in self._cached.where.items() if piece.group == group.name}
        alone = Cached(self._cached.plan.only(group), self._length)
        alone.where.update(where)
        alone.limit = self._length
        targets = Targets(layout, start=self._start, out=None)
        fetching = Fetching(self._engine, layout, alone, start=self._start, deadline=self._deadline)
        length = await fetching.fill(targets)
        kv = targets.result(length)[group.name] if length > self._start else {}
        return _Loaded(length, kv, fetching.fetched.lossy)


async def stream_layers(
    engine: Engine, layout: KVLayout, cached: Cached, *, start: int, deadline: Deadline
) -> AsyncIterator[Part]:
    """Yield every layer of [start, the usable length), in the model's order.

    A chunk that cannot be read makes the prefix shorter as long as no layer was handed out; then it ends the stream.
    """
    order = sorted((layer, group.name) for group in layout.groups for layer in group.layers)
    last = {name: layer for layer, name in order}
    length = cached.usable()
    while length > start:
        loads = _GroupLoads(engine, layout, cached, start=start, length=length, deadline=deadline)
        shorter = 0
        try:
            for place, (layer, name) in enumerate(order):
                loaded = await loads.group(name)
                if loaded.length < length:
                    if place:
                        return
                    shorter = loaded.length
                    break
                group = layout.group(name)
                kv = {key: tensor[group.layers.index(layer)] for key, tensor in loaded.kv.items()}
                first = max(start, cached.plan.window_start(group, length))
                lossy = loaded.lossy
                if layer == last[name]:
                    loads.drop(name)
                del loaded  # the consumer alone holds the memory
                yield Part(group=name, start=first, stop=length, kv=kv, layer=layer, lossy=lossy)
            else:
                return
        finally:
            await loads.end()
        length = shorter


async def stream_parts(
    engine: Engine, layout: KVLayout, cached: Cached, *, start: int, by: Literal["chunk", "layer"], deadline: Deadline
) -> AsyncIterator[Part]:
    """Yield the parts of [start, usable length) in order; what cannot be read ends the stream."""
    if by == "chunk":
        parts = stream_chunks(engine, layout, cached, start=start, deadline=deadline)
    elif by == "layer":
        parts = stream_layers(engine, layout, cached, start=start, deadline=deadline)
    else:
        raise InvalidValueError(f"by={by!r}: must be 'chunk' or 'layer'")
    async for part in parts:
        yield part

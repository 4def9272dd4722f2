"""A prefix stored layer by layer: while one layer group is copied and written, the model computes the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.layout import KVLayout
from kvtier.chunk.tensors import dense, tensor_over
from kvtier.chunk.transfer import Copies
from kvtier.errors import InvalidValueError, LayoutMismatchError
from kvtier.store.exchange import KVSource, token_axis
from kvtier.store.kv_puts import put_source
from kvtier.store.results import ChunkPut, PutResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from kvtier.chunk.layout import LayerGroup
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.store.engine import Engine
    from kvtier.store.kv_puts import PutTerms
    from kvtier.store.plan import PrefixPlan


@dataclass(slots=True)
class _LayerSource:
    """The layers of one group, each in tensors of its own without a layer axis; all end at position `stop`."""

    layers: Sequence[int]
    stop: int
    token_axis: int  # of a layer's tensors
    tensors: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    foreign: KVSource | None = None  # an engine's own blocks, as they are since the last layer

    def check_source(self, layout: KVLayout, *, start: int, stop: int) -> None:
        """Nothing is left to check."""

    def held_from(self, group: str) -> int:
        """As the contract says."""
        del group
        tensors = self.tensors[self.layers[0]]
        return self.stop - next(iter(tensors.values())).shape[self.token_axis]

    def read(self, group: str, specs: Sequence[SegmentSpec], views: Sequence[memoryview]) -> None:
        """As the contract says."""
        first, copies = self.held_from(group), Copies()
        for spec, view in zip(specs, views, strict=True):
            axis = token_axis(spec)
            for into, layer in zip(tensor_over(view, spec), self.layers, strict=True):
                given = self.tensors[layer][spec.name]
                copies.add(given.narrow(axis - 1, spec.first_token - first, spec.shape[axis]), into)
        copies.run()


class LayerPuts:
    """One put that is given its KV layer by layer. Made by `KVStore.put_layers`; belongs to the store's loop."""

    def __init__(
        self,
        engine: Engine,
        plan: PrefixPlan,
        layout: KVLayout,
        terms: PutTerms,
        deadline_seconds: float | None,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._layout = layout
        self._terms = terms
        self._deadline_seconds = deadline_seconds
        self._sources = {
            group.name: _LayerSource(group.layers, plan.num_tokens, token_axis=layout.axes.index("T") - 1)
            for group in layout.groups
        }
        self._tasks: dict[str, asyncio.Task[Sequence[ChunkPut]]] = {}
        self._result: PutResult | None = None

    async def __aenter__(self) -> Self:
        self._engine.begin(self._deadline_seconds)
        self._terms.check(self._engine, self._plan)
        return self

    def add(self, layer: int, kv: Mapping[str, torch.Tensor] | KVSource) -> None:
        """Give one layer's KV of [start, end of the prefix), in any order of layers; returns at once.

        The tensors must stay as they are until the scope is left.

        Args:
            layer: its index in the model.
            kv: tensors shaped like the layout without the layer axis; or `PagedLayout.source`, made when the layer's
                KV is in the blocks, or on its way there on the current stream.

        Raises:
            InvalidValueError: no such layer, or one that was given already.
            LayoutMismatchError: tensors that do not fit.
        """
        group = self.collect(layer, kv)
        if group is not None:
            put = self.put_group(group, deadline_seconds=self._deadline_seconds)
            self._tasks[group] = asyncio.create_task(put, name=f"kvtier put {group}")

    def collect(self, layer: int, kv: Mapping[str, torch.Tensor] | KVSource) -> str | None:
        """Keep one layer's KV; return its group's name if that has all its layers now. Takes and raises as `add`."""
        group = next((group for group in self._layout.groups if layer in group.layers), None)
        if group is None:
            raise InvalidValueError(f"layer {layer!r} is in no group")
        source = self._sources[group.name]
        if layer in source.tensors:
            raise InvalidValueError(f"layer {layer} was given already")
        if isinstance(kv, KVSource):
            kv.check_source(self._layout, start=self._terms.start, stop=self._plan.num_tokens)
            source.foreign, source.tensors[layer] = kv, {}
        else:
            source.tensors[layer] = self._checked(group, layer, kv)
        return group.name if len(source.tensors) == len(group.layers) else None

    def _checked(self, group: LayerGroup, layer: int, kv: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return a layer's tensors, checked as a layout of that layer alone."""
        given: object = kv
        if not isinstance(given, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in given.values()):
            raise LayoutMismatchError(f"layer {layer}: a mapping of tensors is needed")
        stacked = {name: dense(tensor, f"layer {layer}: {name}")[None] for name, tensor in kv.items()}
        alone = KVLayout(
            [type(group)(group.name, (layer,), group.tensors, window=group.window)], axes=self._layout.axes
        )
        matched = alone.match({group.name: stacked}, tokens=self._plan.num_tokens - self._terms.start)
        own = {name: tensor[0] for name, tensor in matched[group.name].items()}
        for number, others in self._sources[group.name].tensors.items():
            if any(own[name].shape != tensor.shape for name, tensor in others.items()):
                raise LayoutMismatchError(f"layers {number} and {layer} of group {group.name!r} hold different tokens")
        return own

    async def put_group(self, name: str, *, deadline_seconds: float | None) -> Sequence[ChunkPut]:
        """Store a group whose layers are all there; on the store's loop."""
        source, layout = self._sources[name], KVLayout([self._layout.group(name)], axes=self._layout.axes)
        deadline = self._engine.begin(deadline_seconds)
        self._terms.check(self._engine, self._plan)
        chosen = source.foreign if source.foreign is not None else source
        return await put_source(self._engine, self._plan, layout, chosen, terms=self._terms, deadline=deadline)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for every group; after an exception, stop what has not been stored yet."""
        tasks = list(self._tasks.values())
        try:
            if kind is None and tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if kind is None:
            self.finish({name: task.result() for name, task in self._tasks.items()})

    def finish(self, done: Mapping[str, Sequence[ChunkPut]]) -> None:
        """Note what became of each group; those that are not named never had all their layers."""
        chunks: list[ChunkPut] = []
        for group in self._layout.groups:
            chunks += done[group.name] if group.name in done else self.dropped(group.name, "layers-missing")
        self._result = PutResult(chunks=tuple(chunks), skipped=self._terms.skipped(self._plan))

    def dropped(self, name: str, reason: str) -> list[ChunkPut]:
        """Return the outcome of a group of which nothing is known to be stored."""
        return [
            ChunkPut(key=self._plan.key(piece), status="dropped", reason=reason)
            for piece in self._plan.to_store(self._terms.start, [self._layout.group(name)])
            if self._terms.tail or not self._plan.has_tail or piece.span < self._plan.spans - 1
        ]

    @property
    def result(self) -> PutResult:
        """What became of each chunk; there once the scope was left in order."""
        if self._result is None:
            raise RuntimeError("the result is there when the scope of put_layers has been left")
        return self._result

"""A prefix stored layer by layer, from a thread that computes."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol

from kvtier.blocking.call import OverdueError
from kvtier.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from kvtier.store.exchange import KVSource
    from kvtier.store.layer_puts import LayerPuts
    from kvtier.store.results import ChunkPut, PutResult


class Submit(Protocol):
    """Begins to store one group, and returns at once."""

    def __call__(self, group: str) -> Future[Sequence[ChunkPut]]:
        """Return the future of what becomes of its chunks."""


class BlockingLayerPuts:
    """As `LayerPuts`, from any thread. Made by `BlockingStore.put_layers`; `add` never waits."""

    def __init__(self, layers: LayerPuts, submit: Submit, *, patient: bool) -> None:
        """Collect in `layers`; `patient`: an overdue put is raised, else dropped as far as its caller can tell."""
        self._layers = layers
        self._submit = submit
        self._patient = patient
        self._futures: dict[str, Future[Sequence[ChunkPut]]] = {}

    def __enter__(self) -> Self:
        return self

    def add(self, layer: int, kv: Mapping[str, torch.Tensor] | KVSource) -> None:
        """As `LayerPuts.add`."""
        group = self._layers.collect(layer, kv)
        if group is not None:
            self._futures[group] = self._submit(group)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for every group, which ends by its deadline; after an exception, stop what has not been stored yet."""
        if kind is not None:
            for future in self._futures.values():
                future.cancel()
        wait(self._futures.values())  # then nothing touches the tensors any more
        if kind is None:
            self._layers.finish({name: self._outcome(name, future) for name, future in self._futures.items()})

    def _outcome(self, name: str, future: Future[Sequence[ChunkPut]]) -> Sequence[ChunkPut]:
        try:
            return future.result()
        except (OverdueError, CapacityError) as exc:
            if self._patient:
                raise
            return self._layers.dropped(name, "overdue" if isinstance(exc, OverdueError) else "queue-full")

    @property
    def result(self) -> PutResult:
        """As `LayerPuts.result`."""
        return self._layers.result

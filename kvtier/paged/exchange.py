"""An engine's blocks as the source of a put and the target of a get, ordered with the engine's streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.tensors import tensor_over
from kvtier.errors import InvalidValueError, LayoutMismatchError
from kvtier.paged.group import tokens_first
from kvtier.paged.kernels import gather, scatter
from kvtier.store.exchange import token_axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.buffers.devices import Event
    from kvtier.chunk.layout import KVLayout
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.paged.axes import Pages
    from kvtier.paged.group import PagedGroup
    from kvtier.paged.layout import PagedLayout
    from kvtier.paged.places import BlockTable, Places, SlotMapping


class _Exchange:
    """What both directions share: where the tokens lie, and a stream that follows the caller's."""

    def __init__(
        self,
        layout: PagedLayout,
        tables: Mapping[str, BlockTable | SlotMapping],
        *,
        first: int,
        stream: object,
    ) -> None:
        if type(first) is not int or first < 0:
            raise InvalidValueError(f"first={first!r}: must be a position, 0 or more")
        self._layout = layout
        self._tables = tables
        self._first = first
        self._stream = layout.device.stream()
        # What the engine has asked its stream for so far comes first: computing the KV, or the last use of the blocks.
        self._stream.wait(layout.device.current(stream).record())

    def _check_layout(self, layout: KVLayout) -> None:
        own = self._layout.kv_layout(axes=layout.axes)
        if own != layout:
            raise LayoutMismatchError(
                f"the blocks hold {own!r}, the store {layout!r}; open it with layout=paged.kv_layout()"
            )

    def _stop(self) -> int:
        """Return the position behind the last token that every group has a place for."""
        return self._first + min(table.tokens for table in self._tables.values())

    def _places(self, group: PagedGroup, first: int, tokens: int) -> Places:
        places = self._tables[group.name].places(first - self._first, first - self._first + tokens)
        if group.whole_blocks and places.blocks is None:
            raise InvalidValueError(f"in native order tokens move in whole blocks of {group.block_tokens}")
        return places


class PagedSource(_Exchange):
    """A prompt's tokens in an engine's blocks, for `store.put`. Made by `PagedLayout.source`."""

    def check_source(self, layout: KVLayout, *, start: int, stop: int) -> None:
        """Check that this holds tokens [start, stop).

        Raises:
            LayoutMismatchError: the blocks are of another layout.
            InvalidValueError: the blocks hold other tokens.
        """
        self._check_layout(layout)
        if start < self._first or stop > self._stop():
            raise InvalidValueError(
                f"the blocks hold tokens [{self._first}, {self._stop()}), the put is of [{start}, {stop})"
            )

    def held_from(self, group: str) -> int:
        """Return the position of the first token held."""
        del group
        return self._first

    def read(self, group: str, specs: Sequence[SegmentSpec], views: Sequence[memoryview]) -> None:
        """Gather the tokens that `specs` describe; returns when the blocks may be overwritten."""
        chosen = self._layout.groups[group]
        for spec, view in zip(specs, views, strict=True):
            places = self._places(chosen, spec.first_token, spec.shape[token_axis(spec)])
            out = tokens_first(tensor_over(view, spec), spec)
            self._stream.run(partial(_gather_to_host, chosen.tensors[spec.name], places, out))
        self._stream.record().synchronize()


class PagedTarget(_Exchange):
    """Places of a prompt's tokens in an engine's blocks, for `store.get(out=...)`. Made by `PagedLayout.target`."""

    def __init__(
        self,
        layout: PagedLayout,
        tables: Mapping[str, BlockTable | SlotMapping],
        *,
        first: int,
        stream: object,
        with_event: bool,
    ) -> None:
        super().__init__(layout, tables, first=first, stream=stream)
        self._with_event = with_event
        self._event: Event | None = None

    def check_target(self, layout: KVLayout, *, start: int) -> None:
        """Check that this can take tokens from `start` on.

        Raises:
            LayoutMismatchError: the blocks are of another layout.
            InvalidValueError: the blocks begin at another token, or within a block that moves as a whole.
        """
        self._check_layout(layout)
        if start < self._first:
            raise InvalidValueError(f"the blocks begin at token {self._first}, the get at {start}")
        for group in self._layout.groups.values():
            if group.whole_blocks and (start - self._first) % group.block_tokens:
                raise InvalidValueError(f"in native order a get begins with a block of {group.block_tokens} tokens")

    def cap(self, cap: int) -> int:
        """Return the greatest length up to `cap` that there is room for; whole blocks in native order."""
        cap = min(cap, self._stop())
        for group in self._layout.groups.values():
            if group.whole_blocks:
                cap -= max(cap - self._first, 0) % group.block_tokens
        return cap

    @property
    def event(self) -> object | None:
        """What a consumer waits for, if it asked for that."""
        return self._event

    def write(self, group: str, spec: SegmentSpec, source: torch.Tensor, first: int) -> None:
        """Scatter the tokens of one tensor, of `spec`'s axes and dtype.

        Returns when `source` may be used again and, without event, all is visible.
        """
        chosen = self._layout.groups[group]
        places = self._places(chosen, first, source.shape[token_axis(spec)])
        pages = chosen.tensors[spec.name]
        staged: list[torch.Tensor] = []
        self._stream.run(partial(_stage, pages, tokens_first(source, spec), staged))
        copied = self._stream.record() if self._with_event else None
        self._stream.run(lambda: scatter(pages, places, staged.pop()))
        done = self._stream.record()
        if copied is None or not _on_device(pages):
            done.synchronize()
        else:
            copied.synchronize()
        self._event = done if self._with_event else None


def _on_device(pages: Pages) -> bool:
    """Tell whether blocks lie in a device's memory, so that what is brought there is a copy."""
    return pages.layers[0].is_cuda


def _gather_to_host(pages: Pages, places: Places, out: torch.Tensor) -> None:
    """Gather straight into host memory, or on the device first where the blocks lie there; `out` is host memory."""
    if not _on_device(pages):
        gather(pages, places, out)
        return
    dense = out if out.is_contiguous() else out.transpose(1, 2)  # "LHTD" in memory: let the device transpose
    staging = torch.empty(dense.shape, dtype=dense.dtype, device=pages.layers[0].device)
    gather(pages, places, staging if dense is out else staging.transpose(1, 2))
    dense.copy_(staging, non_blocking=True)  # registered memory: the host goes on


def _stage(pages: Pages, source: torch.Tensor, staged: list[torch.Tensor]) -> None:
    """Bring a chunk to where the blocks are: one copy in the order of its memory."""
    if not _on_device(pages):
        staged.append(source)
        return
    dense = source if source.is_contiguous() or source.dim() != 4 else source.transpose(1, 2)  # noqa: PLR2004
    moved = dense.to(pages.layers[0].device, non_blocking=True)
    staged.append(moved if dense is source else moved.transpose(1, 2))

"""Gather and scatter between blocks and plain tensors on the CPU; for CUDA, what is done where Triton is missing.

Elements are moved as integers, so that every bit arrives, NaNs included. What lies in rows on both sides is moved by
one call per tensor; everything else by one strided copy per run of neighbouring slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtier.chunk.serial import on_this_thread
from kvtier.paged.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.paged.axes import Pages
    from kvtier.paged.places import Places
    from kvtier.paged.rows import Rows

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(pages: Pages, places: Places, out: torch.Tensor) -> None:
    """Copy tokens out of the blocks of every layer: `out` is [L, T, H, D] or [L, T, D], of any strides."""
    on_this_thread(lambda: _gather(pages, places, out))


def _gather(pages: Pages, places: Places, out: torch.Tensor) -> None:
    for stacked, into, rows in _parts(pages, places, out):
        if rows is not None:
            rows.gather(stacked, into)
            continue
        for run in places.runs:
            source = stacked[:, run.block, run.offset : run.offset + run.tokens]
            into[:, run.token : run.token + run.tokens].copy_(source)


def scatter(pages: Pages, places: Places, source: torch.Tensor) -> None:
    """Copy tokens into the blocks of every layer: `source` is [L, T, H, D] or [L, T, D], of any strides."""
    on_this_thread(lambda: _scatter(pages, places, source))


def _scatter(pages: Pages, places: Places, source: torch.Tensor) -> None:
    for stacked, part, rows in _parts(pages, places, source):
        if rows is not None:
            rows.scatter(stacked, part)
            continue
        for run in places.runs:
            into = stacked[:, run.block, run.offset : run.offset + run.tokens]
            into.copy_(part[:, run.token : run.token + run.tokens])


def _parts(
    pages: Pages, places: Places, chunk: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Rows | None]]:
    """Yield blocks and chunk as integers, and their rows: all layers at once if they lie at equal distances."""
    whole = as_integers(chunk)
    if pages.stacked is not None:
        stacked = as_integers(pages.stacked)
        yield stacked, whole, rows_of(stacked, places, whole)
        return
    for layer, part in zip(pages.layers, whole, strict=True):
        stacked = as_integers(layer)[None]
        yield stacked, part[None], rows_of(stacked, places, part[None])


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements as integers of their size."""
    return tensor.view(_INTEGERS[tensor.element_size()])

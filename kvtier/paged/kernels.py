"""Gather and scatter, by Triton on CUDA where it is installed, else by torch."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, cast

import torch

from kvtier.paged import copying

if TYPE_CHECKING:
    from kvtier.paged.axes import Pages
    from kvtier.paged.places import Places

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class _Kernels(Protocol):
    def copy_tokens(
        self, stacked: torch.Tensor, chunk: torch.Tensor, places: torch.Tensor, *, scatter: bool
    ) -> None: ...


@lru_cache(maxsize=1)
def _kernels() -> _Kernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return cast("_Kernels", importlib.import_module("kvtier.paged.triton_kernels"))


def gather(pages: Pages, places: Places, out: torch.Tensor) -> None:
    """Copy tokens out of the blocks of every layer: `out` is [L, T, H, D] or [L, T, D], of any strides."""
    if not _by_kernel(pages, places, out, scatter=False):
        copying.gather(pages, places, out)


def scatter(pages: Pages, places: Places, source: torch.Tensor) -> None:
    """Copy tokens into the blocks of every layer: `source` is [L, T, H, D] or [L, T, D], of any strides."""
    if not _by_kernel(pages, places, source, scatter=True):
        copying.scatter(pages, places, source)


def _by_kernel(pages: Pages, places: Places, chunk: torch.Tensor, *, scatter: bool) -> bool:
    """Do it by kernel, if both sides are on one CUDA device and lie as the kernel needs them."""
    first = pages.layers[0]
    kernels = _kernels() if first.is_cuda and chunk.device == first.device and places.tokens else None
    if kernels is None:
        return False
    if pages.stacked is not None:
        pairs = [(pages.stacked, chunk)]
    else:
        pairs = [(layer[None], part[None]) for layer, part in zip(pages.layers, chunk, strict=True)]
    words = [as_words(stacked, part) for stacked, part in pairs]
    if any(word is None for word in words):
        return False
    table = place_table(places).to(first.device, non_blocking=True)
    for word in words:
        if word is not None:
            kernels.copy_tokens(word[0], word[1], table, scatter=scatter)
    return True


def place_table(places: Places) -> torch.Tensor:
    """Return block and offset of every token, [2, T] int64."""
    table = torch.empty((2, places.tokens), dtype=torch.int64)
    for run in places.runs:
        stop = run.token + run.tokens
        table[0, run.token : stop] = run.block
        table[1, run.token : stop] = torch.arange(run.offset, run.offset + run.tokens)
    return table


def as_words(stacked: torch.Tensor, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return [L, B, N, H, W] and [L, T, H, W] views in the largest integers that both allow.

    None where the elements of a head do not lie side by side: then torch copies.
    """
    if stacked.stride(-1) != 1 or chunk.stride(-1) != 1:
        return None
    if stacked.dim() == 4:  # noqa: PLR2004  # a latent: one head
        stacked, chunk = stacked.unsqueeze(3), chunk.unsqueeze(2)
    size = stacked.element_size()
    for word in _WORDS:
        if word.itemsize < size:
            break
        ratio = word.itemsize // size
        if all(_divides(tensor, ratio) and tensor.data_ptr() % word.itemsize == 0 for tensor in (stacked, chunk)):
            return stacked.view(word), chunk.view(word)
    return None


def _divides(tensor: torch.Tensor, ratio: int) -> bool:
    steps = (tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1])
    return all(step % ratio == 0 for step in steps)

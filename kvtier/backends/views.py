"""Buffers of either kind seen as flat byte views. Needs no torch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvtier.chunk.memory import copy_bytes
from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kvtier.backends.base import Buffer

BIG_BYTES = 64 << 10  # more than this is never copied on the event loop


def host_view(buffer: Buffer) -> memoryview:
    """Return the bytes of `buffer` as a flat view of format "B", which keeps `buffer` alive.

    Raises:
        InvalidValueError: not one-dimensional contiguous bytes in host memory.
    """
    if isinstance(buffer, memoryview):
        if not buffer.c_contiguous:
            raise InvalidValueError("a buffer must be contiguous bytes")
        return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
    return _tensor_view(buffer)


def _tensor_view(tensor: torch.Tensor) -> memoryview:
    if tensor.device.type != "cpu" or tensor.dim() != 1 or tensor.element_size() != 1 or not tensor.is_contiguous():
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        raise InvalidValueError(f"a buffer must be one-dimensional contiguous bytes in host memory, not {found}")
    size = tensor.numel()
    if size == 0:  # the address of an empty tensor is null
        return memoryview(bytearray())
    window = (ctypes.c_char * size).from_address(tensor.data_ptr())
    vars(window)["tensor"] = tensor
    return memoryview(window).cast("B")


def writable_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return `host_view` of each buffer.

    Raises:
        InvalidValueError: as `host_view`, or one cannot be written to.
    """
    views = [host_view(buffer) for buffer in buffers]
    if any(view.readonly for view in views):
        raise InvalidValueError("cannot read into a read-only buffer")
    return views


def total_bytes(views: Iterable[memoryview]) -> int:
    """Return the length of the views' concatenation."""
    return sum(view.nbytes for view in views)


def gather(parts: Sequence[memoryview], into: memoryview) -> None:
    """Copy the concatenation of `parts` to the front of `into`, which must be long enough."""
    end = 0
    for part in parts:
        copy_bytes(part, into[end : end + part.nbytes])
        end += part.nbytes


def scatter(source: memoryview, into: Sequence[memoryview]) -> int:
    """Fill `into` one after the other from `source`, as far as it goes; return the bytes copied."""
    start = 0
    for view in into:
        size = min(view.nbytes, source.nbytes - start)
        copy_bytes(source[start : start + size], view[:size])
        start += size
    return start

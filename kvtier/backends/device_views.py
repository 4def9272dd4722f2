"""Buffers of either kind as flat tensors, for copies between host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtier.backends.views import host_view
from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from kvtier.backends.base import Buffer


def check_buffer(buffer: Buffer, device: torch.device, *, writable: bool) -> None:
    """Check what a caller gave.

    Raises:
        InvalidValueError: not one-dimensional contiguous bytes, on another device, or read-only where it is written.
    """
    if isinstance(buffer, torch.Tensor) and buffer.device.type != "cpu":
        if buffer.device != device:
            raise InvalidValueError(f"a buffer on {buffer.device} for entries on {device}")
        if buffer.dim() != 1 or buffer.element_size() != 1 or not buffer.is_contiguous():
            raise InvalidValueError(f"a buffer must be one-dimensional bytes, not {buffer.dtype} {list(buffer.shape)}")
    elif host_view(buffer).readonly and writable:
        raise InvalidValueError("cannot read into a read-only buffer")


def flat_tensor(buffer: Buffer) -> torch.Tensor:
    """Return a checked buffer's bytes as a one-dimensional uint8 tensor that shares its memory, if that is writable."""
    if isinstance(buffer, torch.Tensor):
        return buffer.detach().view(torch.uint8)
    view = host_view(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)

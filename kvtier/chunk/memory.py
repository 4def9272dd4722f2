"""Copies between byte views that let other threads run; no torch needed."""

from __future__ import annotations

import ctypes

_PIECE = 1 << 20


def copy_bytes(source: memoryview, into: memoryview) -> None:
    """Copy all of `source` over all of `into`: one-dimensional byte views of one length that do not overlap.

    Raises:
        ValueError: lengths differ.
    """
    size = len(source)
    if size != len(into):
        raise ValueError(f"{size} bytes into {len(into)}")
    if size <= _PIECE:
        into[:] = source
    elif source.readonly:
        # Slices of read-only memory have no address that ctypes gives out; a slice copy holds the GIL, so in pieces.
        for start in range(0, size, _PIECE):
            into[start : start + _PIECE] = source[start : start + _PIECE]
    else:
        ctypes.memmove(_address(into), _address(source), size)  # a foreign function: runs without the GIL


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

"""What the kernel says about its page cache; the standard library does not ask it."""

from __future__ import annotations

import ctypes
import mmap
import sys

_CACHESTAT = 451  # the system call's number on every architecture but Alpha; since Linux 6.5


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Tell whether the page cache holds all of these bytes of a file; False where the kernel cannot be asked.

    Asking reads nothing and changes nothing (a read with `RWF_NOWAIT` would start to fill the cache).
    """
    if _libc is None:
        return False
    wanted, counts = _Range(offset, size), _Counts()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(counts), 0) != 0:
        return False
    pages = -(-(offset + size) // mmap.PAGESIZE) - offset // mmap.PAGESIZE
    return bool(counts.cached >= pages)

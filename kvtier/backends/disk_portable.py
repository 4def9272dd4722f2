"""Transfers at an offset: the platform's own calls, or unbuffered file objects where it has none.

A file object's `readinto` is what `aiofiles` calls in a thread of its executor. Here the thread is the tier's,
and there already: one job per entry, which ends when the transfer has ended, also if its caller is cancelled.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HAS_VECTORS: bool = hasattr(os, "preadv") and hasattr(os, "pwritev")


def read_at(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill `views`, or the first of them, from a file at `offset`; return bytes read, 0 at the file's end.

    The descriptor's own position may change: no two threads may share it.
    """
    if HAS_VECTORS:
        return os.preadv(fd, views, offset)
    with io.FileIO(fd, "r", closefd=False) as file:
        file.seek(offset)
        return file.readinto(views[0]) or 0


def write_at(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Write `views`, or a part of the first of them, to a file at `offset`; return bytes written."""
    if HAS_VECTORS:
        return os.pwritev(fd, views, offset)
    with io.FileIO(fd, "r+", closefd=False) as file:
        file.seek(offset)
        return file.write(views[0]) or 0

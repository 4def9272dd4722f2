"""Stored bytes as commands look at them: read whole or up to the header, and held against every checksum."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier import registry
from kvtier.backends.base import Read
from kvtier.chunk.container import MAX_FRONT, PAGE, NeedMore, peek, verify
from kvtier.errors import BackendError, CorruptChunkError
from kvtier.keys.names import name_of

if TYPE_CHECKING:
    from kvtier.backends.base import Backend, Stat
    from kvtier.chunk.header import Header

FIRST_READ = 2 * PAGE


@dataclass(frozen=True, slots=True)
class Container:
    """An entry as it is stored, verified."""

    header: Header
    stored: memoryview


async def read_header(backend: Backend, stat: Stat) -> Header:
    """Read an entry's header.

    Raises:
        BackendError: it is gone, or the medium failed.
        CorruptChunkError: it has no header that can be read, or one of another name's key.
    """
    size = min(stat.size, FIRST_READ)
    while True:
        front = await _read(backend, stat.name, size, partial=True)
        try:
            return _named(peek(front), stat.name)
        except NeedMore as more:
            if not size < more.size <= min(MAX_FRONT, stat.size):
                raise CorruptChunkError(f"entry of {stat.size} bytes is cut short") from None
            size = more.size


async def read_verified(backend: Backend, stat: Stat, *, max_raw: int) -> Container:
    """Read a whole entry and check all of it.

    Raises:
        BackendError: it is gone, was replaced meanwhile, or the medium failed.
        CorruptChunkError: something in it is not as it must be.
    """
    view = await _read(backend, stat.name, max(stat.size, 1))
    return Container(check(view, stat.name, max_raw=max_raw), view)


def check(view: memoryview, name: str, *, max_raw: int) -> Header:
    """Check a whole container; raises `CorruptChunkError`."""
    try:
        key = _named(peek(view), name).key
    except NeedMore:
        raise CorruptChunkError(f"entry of {len(view)} bytes is cut short") from None
    return verify(view, key=key, codecs=registry.codecs.names(), max_raw=max_raw)


async def _read(backend: Backend, name: str, size: int, *, partial: bool = False) -> memoryview:
    view = memoryview(mmap.mmap(-1, size))  # page-aligned, so that direct I/O needs no second copy
    (answer,) = await backend.read_many([Read(name, [view], partial=partial)])
    if isinstance(answer, BackendError):
        raise answer
    if answer is None:
        raise BackendError(f"entry {name} is gone")
    return view[:answer]


def _named(header: Header, name: str) -> Header:
    if name_of(header.key) != name:
        raise CorruptChunkError(f"entry {name} holds key {header.key!r}")
    return header

"""What a tier holds: entries by key, with an exact count of their bytes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvtier.keys.names import name_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from kvtier.tier.value import Value

NAMELESS = "\0"  # begins the stand-in key of an entry known by its medium name only; no legal key holds NUL
_LOSSY = (False, True, None)
_MOST_SIZES = 1024


class Entry(msgspec.Struct, gc=False, eq=False):
    """One chunk in one tier; made by `new_entry`. Compared by identity: a replaced entry is another entry.

    There may be a million, so it is small, and Python's garbage collector does not know it: of ordinary objects a full
    collection looks at each, while everything stands still. So it must never refer to what leads back to it.
    """

    key: str
    size: int  # bytes on the medium
    parent: str | None
    expires: float | None  # wall-clock seconds
    created: float | None  # wall-clock second of the put; None: not known before its header is read
    marks: int  # `priority` and `lossy` in one small number, which costs no memory of its own

    @property
    def name(self) -> str:
        """Its name on the medium; made anew each time."""
        return self.key[1:] if self.nameless else name_of(self.key)

    @property
    def nameless(self) -> bool:
        """Whether its key is not known yet."""
        return self.key.startswith(NAMELESS)

    @property
    def lossy(self) -> bool | None:
        """Whether its value is lossy; None: not known before its header is read."""
        return _LOSSY[self.marks % 3]

    @property
    def priority(self) -> int:
        """Entries of a lower one go first."""
        return self.marks // 3

    @property
    def value(self) -> Value | None:
        """The value, in a memory tier."""
        return None

    def remark(self, *, lossy: bool | None, priority: int) -> None:
        """Change what is known of it."""
        self.marks = 3 * priority + _LOSSY.index(lossy)


class HeldEntry(Entry, gc=False, eq=False):
    """An entry of a memory tier."""

    held: Value

    @property
    def value(self) -> Value:
        """The value."""
        return self.held


def new_entry(
    key: str,
    size: int,
    *,
    parent: str | None = None,
    expires: float | None = None,
    lossy: bool | None = False,
    priority: int = 0,
    created: float | None = None,
) -> Entry:
    """Return an entry that no index has yet."""
    return Entry(key, size, parent, expires, created, 3 * priority + _LOSSY.index(lossy))


def held_entry(value: Value, *, size: int, expires: float | None, priority: int) -> HeldEntry:
    """Return an entry for a value that a memory tier keeps."""
    header = value.header
    marks = 3 * priority + _LOSSY.index(header.lossy)
    return HeldEntry(value.key, size, header.parent, expires, header.created, marks, value)


@dataclass(slots=True)
class TierIndex:
    """Entries of one tier by key.

    A scan may find names whose key nothing tells (hashed names, no journal): they stand here under
    `NAMELESS + name`, can be evicted, and take their key when somebody asks for it or their header was read.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    size: int = 0
    nameless: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _listeners: list[list[Entry]] = field(default_factory=list)

    def find(self, key: str) -> Entry | None:
        """Return the entry of `key`, also when it still stands under its name."""
        entry = self.entries.get(key)
        return self.entries.get(NAMELESS + name_of(key)) if entry is None and self.nameless else entry

    def insert(self, entry: Entry) -> None:
        """Take in an entry; one of the same key must have been removed before."""
        if entry.key in self.entries:
            msg = f"entry {entry.key!r} is in the index already"
            raise RuntimeError(msg)
        self._share(entry)
        self.entries[entry.key] = entry
        self.size += entry.size
        self.nameless += entry.nameless
        for arrived in self._listeners:
            arrived.append(entry)

    def _share(self, entry: Entry) -> None:
        """Let entries share equal texts and numbers: they are most of what an entry would weigh."""
        above = self.entries.get(entry.parent) if entry.parent is not None else None
        if above is not None:
            entry.parent = above.key
        if len(self._sizes) < _MOST_SIZES:
            entry.size = self._sizes.setdefault(entry.size, entry.size)
        else:
            entry.size = self._sizes.get(entry.size, entry.size)

    def remove(self, entry: Entry) -> bool:
        """Drop this very entry; tell whether it was (still) the one in the index."""
        if self.entries.get(entry.key) is not entry:
            return False
        del self.entries[entry.key]
        self.size -= entry.size
        self.nameless -= entry.nameless
        return True

    @contextmanager
    def listening(self) -> Generator[list[Entry], None, None]:
        """Lend a list of what is taken in during the block."""
        arrived: list[Entry] = []
        self._listeners.append(arrived)
        try:
            yield arrived
        finally:
            self._listeners = [each for each in self._listeners if each is not arrived]

    def keys_under(self, prefix: str) -> Iterator[str]:
        """Iterate a snapshot of the known keys that begin with `prefix`."""
        return iter([key for key, entry in self.entries.items() if key.startswith(prefix) and not entry.nameless])

    def __len__(self) -> int:
        return len(self.entries)

"""What the leaf directories of a disk tier hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.backends.base import Stat, is_name
from kvtier.backends.disk_layout import (
    ABSENT,
    ENTRIES,
    directory,
    expiry_of,
    names_in,
    shard_of,
    shard_path,
    status_of,
)

if TYPE_CHECKING:
    from kvtier.backends.disk_layout import DiskRoot
    from kvtier.backends.disk_ledger import DiskLedger


def list_shards(root: DiskRoot, ledger: DiskLedger, shards: range, behind: str) -> list[Stat]:
    """Return the entries of some leaves, by shard and name; of the first one those behind a name only.

    The bytes that the ledger counts in each leaf are put right on the way.
    """
    found: list[Stat] = []
    with root.in_use() as top:
        for shard in shards:
            if behind:
                found += list_leaf(top, shard, behind)
                behind = ""
                continue
            leaf = _Leaf(top, shard)
            ledger.observe(shard, leaf.list)
            found += leaf.found
    return found


class _Leaf:
    """One leaf as it was found the last time it was listed."""

    def __init__(self, top: int, shard: int) -> None:
        self._top = top
        self._shard = shard
        self.found: list[Stat] = []

    def list(self) -> int:
        """List the leaf; return the bytes of its entries."""
        self.found = list_leaf(self._top, self._shard)
        return sum(stat.size for stat in self.found)


def list_leaf(top: int, shard: int, behind: str = "") -> list[Stat]:
    """Return the entries of one leaf whose names come behind `behind`, by name; a leaf that is none holds none."""
    try:
        with directory(top, ENTRIES, *shard_path(shard)) as leaf:
            # A set, as a file that is replaced while the directory is read may be met twice.
            names = sorted({name for name in names_in(leaf) if name > behind and _belongs(name, shard)})
            return [status for name in names if (status := stat_entry(leaf, name)) is not None]
    except OSError as exc:
        if exc.errno not in ABSENT:
            raise
        return []


def stat_entry(leaf: int, name: str) -> Stat | None:
    """Return what the medium knows of an entry."""
    status = status_of(leaf, name)
    if status is None:
        return None
    return Stat(name, status.st_size, expiry_of(status.st_mtime_ns), status.st_ctime)


def _belongs(name: str, shard: int) -> bool:
    return is_name(name) and shard_of(name) == shard

"""Quick blocking calls on many entries of a disk tier: remove, look, stamp; each answers by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from kvtier.backends.disk_layout import ABSENT, ENTRIES, directory, shard_of, shard_path, status_of
from kvtier.backends.disk_listing import stat_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.backends.base import Stat
    from kvtier.backends.disk_medium import Medium

Answer = TypeVar("Answer")


def delete_entries(medium: Medium, names: Sequence[str]) -> list[bool | OSError]:
    """Remove each entry, its file to be written into again if it suits; answer whether it was there, or what failed."""

    def remove(leaf: int, name: str) -> bool:
        shard = shard_of(name)
        with medium.ledger.locked() as books:
            status = status_of(leaf, name)
            if status is None:
                medium.ledger.doubtful.add(shard)
                return False
            if not medium.spares.keep(books, leaf, name):
                os.unlink(name, dir_fd=leaf)
            books.add(shard, -status.st_size)
        return True

    return _each(medium, names, remove, absent=False)


def stat_entries(medium: Medium, names: Sequence[str]) -> list[Stat | OSError | None]:
    """Answer size and expiry of each entry, `None` for a miss, or what went wrong."""
    return _each(medium, names, stat_entry, absent=None)


def set_mtimes(medium: Medium, items: Sequence[tuple[str, int]]) -> None:
    """Set the modification time, in ns, of each entry's file; absent entries are skipped."""
    moments = dict(items)

    def stamp(leaf: int, name: str) -> None:
        if status_of(leaf, name) is not None:
            os.utime(name, ns=(moments[name], moments[name]), dir_fd=leaf, follow_symlinks=False)

    for outcome in _each(medium, list(moments), stamp, absent=None):
        if outcome is not None:
            raise outcome


def _each(
    medium: Medium, names: Sequence[str], act: Callable[[int, str], Answer], *, absent: Answer
) -> list[Answer | OSError]:
    answers: list[Answer | OSError] = []
    for name in names:
        try:
            with medium.root.in_use() as top, directory(top, ENTRIES, *shard_path(shard_of(name))) as leaf:
                answers.append(act(leaf, name))
        except OSError as exc:
            answers.append(absent if exc.errno in ABSENT else exc)
    return answers

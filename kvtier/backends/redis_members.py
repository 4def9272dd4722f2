"""Members of the index of entries, many at once: what they tell, and which stretch of an index to look at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvtier.backends.base import Stat
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    T = TypeVar("T")

MEMBER_WORDS: Final = 5
_NUMBERS: Final = msgspec.json.Decoder(list[float])  # a third of the time of `float`


@dataclass(frozen=True, slots=True)
class Stretch:
    """What to look at in one call: from member `least` to `most`, in up to `pages` pages of `limit` each."""

    least: str
    most: str
    limit: int
    pages: int


@dataclass(frozen=True, slots=True)
class Members:
    """A page of an index: how many members, their five words each, and the server's milliseconds since the epoch.

    Before each member's words `spare` others may stand.
    """

    count: int
    text: str
    now: int
    spare: int

    @property
    def behind(self) -> str:
        """Where what follows the last of them begins: "!" comes next after the space that ends a name."""
        return f"[{self.text.rsplit(None, MEMBER_WORDS)[-MEMBER_WORDS]}!"

    def stats(self) -> list[Stat]:
        """Return what they tell of the entries that have not expired; raises `BackendError`."""
        return stats_of(self.text, self.now, spare=self.spare)


def stats_of(lines: str, now: int = 0, *, spare: int = 0) -> list[Stat]:
    """Return what members of the index tell; those that have expired by `now` are left out.

    By columns, which takes a third of the time of line by line: a listing of 10,000 is to take milliseconds. Before
    the words of each member there are `spare` others. Raises `BackendError` for anything else.
    """
    words, step = lines.split(), MEMBER_WORDS + spare
    names, lengths, moments, changes = (words[spare + column :: step] for column in range(4))
    mortal = set(moments) != {"0"}
    try:
        if len(words) % step:
            raise ValueError  # noqa: TRY301  # one answer to all that is wrong
        sizes = _each(lengths, int)
        expiry = _each(moments, _seconds) if mortal else repeat(None)
        changed = _NUMBERS.decode(f"[{','.join(changes)}]")
    except (ValueError, msgspec.MsgspecError):
        raise BackendError("the index of entries holds something else") from None
    stats = list(map(Stat, names, sizes, expiry, changed))
    if not mortal:
        return stats
    return [stat for stat in stats if stat.expires is None or stat.expires * 1000 > now]


def _each(words: Sequence[str], convert: Callable[[str], T]) -> Iterator[T]:
    """Convert words of which few differ: entries of one model have one size, and most expire never or together."""
    values = {word: convert(word) for word in set(words)}
    if len(values) == 1:
        return repeat(*values.values())
    return map(values.__getitem__, words)


def _seconds(milliseconds: str) -> float | None:
    return int(milliseconds) / 1000 if milliseconds != "0" else None

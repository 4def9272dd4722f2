"""Looking at entries without reading them: by name, by prefix, and the bytes they hold together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.backends.batches import answer_each
from kvtier.backends.redis_faults import listed, text_of
from kvtier.backends.redis_members import Members, Stretch, stats_of
from kvtier.backends.redis_scripts import ALWAYS, DELETE, EXPIRE, LIST, STAT, TIDY
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from kvtier.backends.base import Stat
    from kvtier.backends.redis_control import Control
    from kvtier.backends.redis_layout import Keys
    from kvtier.backends.redis_wire_path import Path

    T = TypeVar("T")

PAGE_ENTRIES: Final = 2500
PAGES_AT_ONCE: Final = 4
NAMES_AT_ONCE: Final = 500
BUCKETS_AT_ONCE: Final = 16
SUMS_SECONDS: Final = 1.0


class Listing:
    """The small calls of one open backend.

    Args:
        control: of the servers.
        keys: of the entries.
        capacity: bytes that all entries together may hold.
        path: for long replies.
    """

    def __init__(self, control: Control, keys: Keys, *, capacity: int, path: Path) -> None:
        self._path = path
        self._control = control
        self._keys = keys
        self._capacity = capacity
        self._bytes: list[int] = [0] * keys.buckets
        self._summed_at = -SUMS_SECONDS

    async def delete(self, names: Sequence[str]) -> list[bool | BackendError]:
        """Remove entries; tell of each whether it was there."""

        async def some(bucket: int, part: Sequence[str]) -> list[bool]:
            reply = await self._control.script(bucket, DELETE, *part)
            return [flag == "1" for flag in text_of(reply)]

        return await self._by_bucket(names, some)

    async def stat(self, names: Sequence[str]) -> list[Stat | BackendError | None]:
        """Look at entries."""

        async def some(bucket: int, part: Sequence[str]) -> list[Stat | None]:
            lines = text_of(await self._control.script(bucket, STAT, *part)).split("\n")
            return [stats_of(line)[0] if line else None for line in lines]

        return await self._by_bucket(names, some)

    async def set_expiry(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Change expiry; raises `BackendError`."""
        moments = {name: 0 if expires is None else max(1, int(expires * 1000)) for name, expires in items}

        async def some(bucket: int, part: Sequence[str]) -> list[None]:
            words = [word for name in part for word in (name, moments[name])]
            await self._control.script(bucket, EXPIRE, *words)
            return [None] * len(part)

        for answer in await self._by_bucket(list(moments), some):
            if isinstance(answer, BackendError):
                raise answer

    async def scan(self, after: str | None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of all entries by bucket, then name; what the index has and the server lost is forgotten."""
        first = self._keys.bucket(after) if after is not None else 0
        if self._keys.buckets == 1:
            async for page in self._pages(0, after=after):
                yield page
            return
        for start in range(first, self._keys.buckets, BUCKETS_AT_ONCE):
            buckets = range(start, min(start + BUCKETS_AT_ONCE, self._keys.buckets))
            for found in await answer_each(lambda b: self._whole(b, after if b == first else None), buckets):
                if isinstance(found, BackendError):
                    raise found
                for at in range(0, len(found), PAGE_ENTRIES):
                    yield found[at : at + PAGE_ENTRIES]

    async def under(self, prefix: str) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of the entries whose names begin with a literal prefix; what the server evicted may be listed."""
        if self._keys.buckets == 1:
            async for page in self._under(0, prefix):
                yield page
            return
        for start in range(0, self._keys.buckets, BUCKETS_AT_ONCE):
            buckets = range(start, min(start + BUCKETS_AT_ONCE, self._keys.buckets))
            for found in await answer_each(lambda b: self._whole_under(b, prefix), buckets):
                if isinstance(found, BackendError):
                    raise found
                if found:
                    yield found

    async def _whole(self, bucket: int, after: str | None) -> list[Stat]:
        return [stat async for page in self._pages(bucket, after=after) for stat in page]

    async def _whole_under(self, bucket: int, prefix: str) -> list[Stat]:
        return [stat async for page in self._under(bucket, prefix) for stat in page]

    async def _pages(self, bucket: int, *, after: str | None = None) -> AsyncIterator[list[Stat]]:
        # In the order of members a name ends with a space; "!" comes next after it.
        least = "-" if after is None else f"[{after}!"
        while True:
            reply = await self._path.run(bucket, LIST, [least, str(PAGE_ENTRIES)])
            count, last, there, gone, now = listed(reply, 5)
            if gone:
                await self._control.script(bucket, TIDY, *text_of(gone).split(" "))
            page = stats_of(text_of(there), now)
            if page:
                yield page
            if count < PAGE_ENTRIES:
                return
            least = f"[{text_of(last).partition(' ')[0]}!"

    async def _under(self, bucket: int, prefix: str) -> AsyncIterator[list[Stat]]:
        least: str | None = f"[{prefix}" if prefix else "-"
        most = f"({prefix}~" if prefix else "+"  # "~" follows all in names
        while least is not None:
            stretch = Stretch(least, most, PAGE_ENTRIES, PAGES_AT_ONCE)
            pages, least = await self._path.members(bucket, stretch, Members.stats)
            for page in pages:
                if page:
                    yield page

    def allowance(self, bucket: int) -> int:
        """Return how many bytes a bucket may hold: what the others leave of the capacity, as of a second ago."""
        if self._capacity < 0:
            return ALWAYS
        return max(0, self._capacity - sum(self._bytes) + self._bytes[bucket])

    async def refresh_sums(self) -> None:
        """Bring what `allowance` knows up to date, at most once a second; raises `BackendError`."""
        if self._keys.buckets == 1 or time.monotonic() - self._summed_at < SUMS_SECONDS:
            return
        self._summed_at = time.monotonic()

        async def one(bucket: int) -> int:
            return int(text_of(await self._control.command(bucket, "GET", self._keys.counters[bucket]) or b"0"))

        for bucket, answer in enumerate(await answer_each(one, range(self._keys.buckets), limit=BUCKETS_AT_ONCE)):
            if not isinstance(answer, BackendError):
                self._bytes[bucket] = answer

    async def _by_bucket(
        self, names: Sequence[str], call: Callable[[int, Sequence[str]], Coroutine[None, None, list[T]]]
    ) -> list[T | BackendError]:
        """Call with some names of one bucket each; answer in the order of `names`."""
        places: dict[int, list[int]] = {}
        for place, name in enumerate(names):
            places.setdefault(self._keys.bucket(name), []).append(place)
        batches = [
            (bucket, found[at : at + NAMES_AT_ONCE])
            for bucket, found in places.items()
            for at in range(0, len(found), NAMES_AT_ONCE)
        ]
        outcomes = await answer_each(
            lambda batch: call(batch[0], [names[place] for place in batch[1]]), batches, limit=BUCKETS_AT_ONCE
        )
        answers: dict[int, T | BackendError] = {}
        for (_, found), outcome in zip(batches, outcomes, strict=True):
            of_batch = [outcome] * len(found) if isinstance(outcome, BackendError) else outcome
            answers.update(zip(found, of_batch, strict=True))
        return [answers[place] for place in range(len(names))]

"""One tier's entries copied to another: each verified, none over a newer one, none that is there copied again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvtier.backends.base import Write
from kvtier.chunk.container import UnknownFormatError
from kvtier.cli.forms import in_form
from kvtier.cli.stored import read_header, read_verified
from kvtier.cli.tiers import within
from kvtier.cli.walking import batches, every
from kvtier.codecs.chain import CodecChain
from kvtier.errors import BackendError, BackendTimeoutError, CapacityError, CodecError, CorruptChunkError
from kvtier.keys.names import name_prefixes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import TypeVar

    from kvtier.backends.base import Backend, Stat
    from kvtier.chunk.header import Header
    from kvtier.cli.stored import Container
    from kvtier.config import TierConfig

    T = TypeVar("T")

LOOKED_UP_AT_ONCE = 500
OUTCOMES: tuple[str, ...] = (
    *("copied", "replaced", "present", "newer", "expired", "gone"),
    *("bad", "foreign", "refused", "too_large", "failed"),
)
NOT_ASKED_FOR = "not asked for"
WRONG: frozenset[str] = frozenset({"bad", "foreign", "refused", "too_large", "failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the caller asked for."""

    prefix: str = ""
    replace_older: bool = False
    lossless: bool = False
    dry_run: bool = False
    in_flight: int = 4
    seconds: float = 60.0


@dataclass(slots=True)
class Migrated:
    """What became of the entries; every one listed at the source and asked for counts exactly once.

    Attributes:
        copied: written, read back and found equal. In a dry run: would be.
        replaced: the same, over an older one, as asked for.
        present: at the target before; with `replace_older`: just as old.
        newer: the target's is newer, or came while this ran; kept.
        expired: its time was over.
        gone: evicted, deleted or replaced at the source while this ran.
        bad: damaged at the source, or not what was written at the target (it is removed there).
        foreign: of a format that this version does not read.
        refused: lossy, where the target's config is lossless; or a codec of the target does not take it.
        too_large: for the target's limits.
        failed: not read or not written.
        copied_bytes: as stored at the target.
        wrong: per name, what was wrong with it.
        stopped: why the rest was not tried; empty if all was.
        left: how many were not tried.
    """

    counts: Counter[str] = field(default_factory=Counter)
    copied_bytes: int = 0
    wrong: dict[str, str] = field(default_factory=dict)
    stopped: str = ""
    left: int = 0

    @property
    def complete(self) -> bool:
        """Whether all that was asked for is at the target."""
        return not self.stopped and not any(self.counts[each] for each in WRONG)

    def plain(self) -> dict[str, object]:
        """Return everything as plain values."""
        counts = {each: self.counts[each] for each in OUTCOMES}
        rest = {name: value for name, value in asdict(self).items() if name != "counts"}
        return {**counts, **rest, "complete": self.complete}


class Migration:
    """Copies from one open backend to another."""

    def __init__(
        self,
        tiers: tuple[TierConfig, TierConfig],
        backends: tuple[Backend, Backend],
        wishes: Wishes,
        tell: Callable[..., None],
    ) -> None:
        (self._from, self._to), (self._source, self._target) = tiers, backends
        self._wishes = wishes
        self._tell = tell
        self._chain = CodecChain([codec.build() for codec in self._to.codecs])
        self._done = 0
        self._result = Migrated()

    async def run(self) -> Migrated:
        """Go through the source, what changed longest ago first: a chunk comes after the chunks before it.

        Raises:
            BackendError: one of the two cannot be listed or asked, or does not answer any more.
        """
        stats = await every(self._source, seconds=self._wishes.seconds, what=f"tier {self._from.name!r}")
        fronts = name_prefixes(self._wishes.prefix)
        asked = sorted((stat for stat in stats if stat.name.startswith(fronts)), key=lambda stat: stat.changed)
        self._tell(0, len(asked))
        try:
            for first in range(0, len(asked), LOOKED_UP_AT_ONCE):
                await self._part(asked[first : first + LOOKED_UP_AT_ONCE])
        except _FullError as exc:
            self._result.stopped = str(exc)
            self._result.left = len(asked) - self._done
        return self._result

    async def _part(self, stats: Sequence[Stat]) -> None:
        there = await within(
            self._target.stat_many([stat.name for stat in stats]),
            self._wishes.seconds,
            f"tier {self._to.name!r} did not tell what it has",
        )
        todo = []
        for stat, answer in zip(stats, there, strict=True):
            if isinstance(answer, BackendError):
                raise answer
            if answer is not None and not self._wishes.replace_older:
                self._count(stat, "present")
            elif answer is None and stat.expires is not None and stat.expires <= time.time():
                self._count(stat, "expired")
            else:
                todo.append((stat, answer))
        older = {stat.name: answer for stat, answer in todo}
        for batch in batches([stat for stat, _ in todo], self._wishes.in_flight):
            await self._batch(batch, older)

    async def _batch(self, batch: Sequence[Stat], older: Mapping[str, Stat | None]) -> None:
        ends = await asyncio.gather(*(self._one(stat, older[stat.name]) for stat in batch), return_exceptions=True)
        for stat, end in zip(batch, ends, strict=True):
            if isinstance(end, BackendError):
                self._count(stat, "failed", str(end))
            elif isinstance(end, BaseException):
                raise end
            else:
                self._count(stat, *end)
        silent = [end for end in ends if isinstance(end, BackendTimeoutError)]
        if silent and len(silent) == len(batch):  # the rest would only take as long, each
            raise silent[0]

    def _count(self, stat: Stat, outcome: str, why: str = "") -> None:
        """Count an entry once, whatever became of it."""
        self._done += 1
        self._tell(self._done)
        if outcome != NOT_ASKED_FOR:
            self._result.counts[outcome] += 1
        if why:
            self._result.wrong[stat.name] = why

    async def _one(self, stat: Stat, older: Stat | None) -> tuple[str, str]:
        """Copy one entry, unless something speaks against it; return its outcome and what is wrong."""
        try:
            entry = await self._read(stat)
            if older is not None:
                await self._hold_against(older, entry.header)
            made = await self._made(entry)
            if not self._wishes.dry_run:
                await self._write(stat, made, over=older is not None)
                await self._read_back(made, stat.name)
        except _Settled as settled:
            return settled.outcome, settled.why
        self._result.copied_bytes += len(made.stored)
        return "copied" if older is None else "replaced", ""

    async def _read(self, stat: Stat) -> Container:
        reading = read_verified(self._source, stat, max_raw=self._from.max_value_bytes)
        try:
            entry = await self._within(reading, f"entry {stat.name} was not read")
        except UnknownFormatError as exc:
            raise _Settled("foreign", str(exc)) from exc
        except BackendTimeoutError:
            raise
        except (CorruptChunkError, BackendError) as exc:
            if await self._is_gone(stat):
                raise _Settled("gone") from exc
            if isinstance(exc, CorruptChunkError):
                raise _Settled("bad", f"at the source: {exc}") from exc
            raise
        if not entry.header.key.startswith(self._wishes.prefix):
            raise _Settled(NOT_ASKED_FOR)
        return entry

    async def _is_gone(self, stat: Stat) -> bool:
        """Tell whether an entry went or changed at the source since the listing."""
        (answer,) = await self._within(self._source.stat_many([stat.name]), f"entry {stat.name} was not looked up")
        if isinstance(answer, BackendError):
            return False
        return answer is None or (answer.size, answer.changed) != (stat.size, stat.changed)

    async def _hold_against(self, there: Stat, header: Header) -> None:
        """Settle for the target's entry unless it is older, lossy for no reason, or damaged."""
        try:
            present = await self._within(read_header(self._target, there), f"entry {there.name} was not read")
        except UnknownFormatError as exc:
            raise _Settled("newer") from exc
        except CorruptChunkError:
            return
        if present.created > header.created:
            raise _Settled("newer")
        better = present.lossy and not header.lossy and not self._chain.lossy
        if present.created == header.created and not better:
            raise _Settled("present")

    async def _made(self, entry: Container) -> Container:
        """Return the entry in the target's form."""
        try:
            made = await asyncio.to_thread(in_form, entry, self._chain)
        except CodecError as exc:
            raise _Settled("refused", str(exc)) from exc
        if made.header.lossy and self._wishes.lossless:
            raise _Settled("refused", "is lossy, and the target's config is lossless")
        limits = (self._to.capacity, self._to.max_value_bytes, self._target.traits.max_value_bytes)
        if len(made.stored) > min(limit for limit in limits if limit is not None):
            raise _Settled("too_large", f"{len(made.stored)} bytes are more than the target takes")
        return made

    async def _write(self, stat: Stat, made: Container, *, over: bool) -> None:
        """Publish an entry with what is left of its life.

        Raises:
            _FullError: there is no room.
        """
        latest = None if self._to.ttl_seconds is None else time.time() + self._to.ttl_seconds
        expires = min((each for each in (stat.expires, latest) if each is not None), default=None)
        write = Write(stat.name, [made.stored], expires=expires, if_absent=not over)
        (answer,) = await self._within(self._target.write_many([write]), f"entry {stat.name} was not written")
        if isinstance(answer, CapacityError):
            raise _FullError(str(answer)) from answer
        if isinstance(answer, BackendError):
            raise answer
        if not answer.stored:  # somebody else was faster
            raise _Settled("newer")
        await self._within(self._target.sync([stat.name]), f"entry {stat.name} was not synced")

    async def _read_back(self, made: Container, name: str) -> None:
        """Hold what stands at the target against what was written; remove it if it is damaged."""
        (there,) = await self._within(self._target.stat_many([name]), f"entry {name} was not looked up")
        if isinstance(there, BackendError):
            raise there
        if there is None:
            raise _Settled("bad", "at the target: it was gone at once")
        reading = read_verified(self._target, there, max_raw=self._to.max_value_bytes)
        try:
            back = await self._within(reading, f"entry {name} was not read back")
        except CorruptChunkError as exc:
            await self._within(self._target.delete_many([name]), f"entry {name} was not removed")
            raise _Settled("bad", f"at the target: {exc}") from exc
        if back.stored != made.stored:
            raise _Settled(
                "newer" if back.header.created > made.header.created else "bad", "another value stands there"
            )

    async def _within(self, work: Awaitable[T], what: str) -> T:
        return await within(work, self._wishes.seconds, what)


class _Settled(Exception):  # noqa: N818  # an outcome, good or bad
    """What became of one entry, and what was wrong with it."""

    def __init__(self, outcome: str, why: str = "") -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.why = why


class _FullError(Exception):
    """The target takes no more."""

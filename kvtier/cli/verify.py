"""`kvtier verify`: every entry of a tier read and held against its checksums."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.chunk.container import UnknownFormatError
from kvtier.cli.ls import LIST_SECONDS
from kvtier.cli.output import human_bytes, print_json, progress
from kvtier.cli.stored import read_verified
from kvtier.cli.tiers import (
    ConfigOption,
    DeadlineOption,
    JsonOption,
    TierOption,
    lasting,
    opened_backend,
    read_config,
    within,
)
from kvtier.cli.walking import batches, every
from kvtier.errors import BackendError, BackendTimeoutError, CorruptChunkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.base import Backend, Stat
    from kvtier.config import TierConfig

MOST_SHOWN = 20


@dataclass(slots=True)
class Scrubbed:
    """What a scrub of one tier found; the unit is an entry unless the name says bytes.

    Attributes:
        tier: its name.
        sound: read and right.
        sound_bytes: and their bytes.
        gone: evicted, deleted or replaced while the scrub ran: nothing is known to be wrong.
        bad: per name, what is wrong with it.
        foreign: of a format that this version does not read; never dropped.
        failed: per name, why it could not be read; never dropped.
        dropped: bad ones that were removed.
    """

    tier: str
    sound: int = 0
    sound_bytes: int = 0
    gone: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    dropped: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is left that is wrong."""
        return len(self.bad) == self.dropped and not self.foreign and not self.failed


def verify(
    config: ConfigOption = None,
    tier: TierOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="drop what is bad; it is a miss from then on")] = False,
    in_flight: Annotated[int, typer.Option(min=1, help="entries read at once")] = 4,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Read every entry and check its container; with --repair drop the bad. Stores may run meanwhile."""
    found = []
    for each in lasting(read_config(config), tier).tiers:
        with progress(f"verifying {each.name}", 1, shown=not json) as tell:
            found.append(asyncio.run(_Scrub(each, deadline_seconds, in_flight=in_flight, tell=tell).run(repair=repair)))
    if json:
        print_json([asdict(scrubbed) | {"clean": scrubbed.clean} for scrubbed in found])
    else:
        for scrubbed in found:
            _show(scrubbed, repair=repair)
    if not all(scrubbed.clean for scrubbed in found):
        raise typer.Exit(1)


class _Scrub:
    """One tier's scrub under way."""

    def __init__(self, tier: TierConfig, seconds: float, *, in_flight: int, tell: Callable[..., None]) -> None:
        self._tier = tier
        self._seconds = seconds
        self._in_flight = in_flight
        self._tell = tell
        self._done = 0
        self._found = Scrubbed(tier.name)

    async def run(self, *, repair: bool) -> Scrubbed:
        """Look at every entry there is.

        Raises:
            ConfigError, BackendError: the tier does not open, cannot be listed, or does not answer any more.
        """
        async with opened_backend(self._tier, seconds=self._seconds) as backend:
            stats = await every(backend, seconds=self._seconds, what=f"tier {self._tier.name!r}")
            self._tell(0, len(stats))
            for batch in batches(stats, self._in_flight):
                answers = await asyncio.gather(*(self._look(backend, stat) for stat in batch))
                if not any(answers):  # the rest would only take as long, each
                    raise BackendTimeoutError(
                        f"tier {self._tier.name!r} stopped answering within {self._seconds:g} s, "
                        f"{self._done - len(batch):,} of {len(stats):,} entries looked at"
                    )
            if repair:
                await self._drop(backend, {stat.name: stat for stat in stats})
        return self._found

    async def _look(self, backend: Backend, stat: Stat) -> bool:
        """Look at one entry; tell whether there was an answer."""
        wrong = await self._wrong_with(backend, stat)
        if wrong is None:
            self._found.sound += 1
            self._found.sound_bytes += stat.size
        elif isinstance(wrong, CorruptChunkError):
            kind = self._found.foreign if isinstance(wrong, UnknownFormatError) else self._found.bad
            kind[stat.name] = str(wrong)
        elif await self._is_gone(backend, stat):
            self._found.gone += 1
        else:
            self._found.failed[stat.name] = str(wrong)
        self._done += 1
        self._tell(self._done)
        return not isinstance(wrong, BackendTimeoutError)

    async def _wrong_with(self, backend: Backend, stat: Stat) -> Exception | None:
        """Return what is wrong with an entry; one that seems damaged is looked at twice, as it may just change."""
        wrong: Exception | None = None
        for _ in range(2):
            try:
                reading = read_verified(backend, stat, max_raw=self._tier.max_value_bytes)
                await within(reading, self._seconds, f"entry {stat.name} was not read")
            except CorruptChunkError as exc:
                wrong = exc
            except BackendError as exc:
                return exc
            else:
                return None
        return wrong

    async def _is_gone(self, backend: Backend, stat: Stat) -> bool:
        """Tell whether an entry that could not be read went or changed since the listing."""
        try:
            (answer,) = await within(backend.stat_many([stat.name]), self._seconds, f"entry {stat.name}: no answer")
        except BackendError:
            return False
        if isinstance(answer, BackendError):
            return False
        return answer is None or (answer.size, answer.changed) != (stat.size, stat.changed)

    async def _drop(self, backend: Backend, stats: dict[str, Stat]) -> None:
        """Remove bad entries, but for those that somebody replaced meanwhile."""
        for name in list(self._found.bad):
            if await self._is_gone(backend, stats[name]):
                del self._found.bad[name]
                self._found.gone += 1
                continue
            (answer,) = await within(backend.delete_many([name]), self._seconds, f"entry {name} was not removed")
            if isinstance(answer, BackendError):
                self._found.failed[name] = str(answer)
            else:
                self._found.dropped += 1


def _show(found: Scrubbed, *, repair: bool) -> None:
    print(f"{found.tier}: {found.sound:,} entries are right ({human_bytes(found.sound_bytes)})")
    for word, names in (("bad", found.bad), ("another format", found.foreign), ("not read", found.failed)):
        for name, why in list(names.items())[:MOST_SHOWN]:
            print(f"  {word}: {name}\n    {why}")
        if len(names) > MOST_SHOWN:
            print(f"  and {len(names) - MOST_SHOWN} more that are {word}; --json lists all")
    if found.gone:
        print(f"  {found.gone} went or changed meanwhile")
    if found.bad:
        print(f"  {found.dropped} dropped" if repair else "  drop the bad with: kvtier verify --repair")

"""`kvtier gc`: what is expired or over the capacity removed from the tiers that outlive a process."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.ls import LIST_SECONDS
from kvtier.cli.output import human_bytes, print_json, progress
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
from kvtier.cli.walking import every
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.backends.base import Stat
    from kvtier.config import TierConfig

BATCH = 200


def gc(
    config: ConfigOption = None,
    tier: TierOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="count only")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="s3: remove entries of formats not read here, too")
    ] = False,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Remove what is expired, then what is over the tier's capacity, longest unchanged first. Stores may run."""
    found = {}
    for each in lasting(read_config(config), tier).tiers:
        with progress(f"collecting {each.name}", 1, shown=not json) as tell:
            if each.backend == "s3":
                found[each.name] = asyncio.run(_in_bucket(each, deadline_seconds, foreign=foreign, dry_run=dry_run))
            else:
                found[each.name] = asyncio.run(_collected(each, deadline_seconds, tell, dry_run=dry_run))
    if json:
        print_json(found)
    else:
        for name, counts in found.items():
            print(f"{name}:{' (dry run)' if dry_run else ''}")
            for what, count in counts.items():
                print(f"  {what}: {human_bytes(count) if 'bytes' in what else f'{count:,}'}")
    if any(counts["failed"] for counts in found.values()):
        raise typer.Exit(1)


async def _in_bucket(tier: TierConfig, seconds: float, *, foreign: bool, dry_run: bool) -> dict[str, int]:
    """Have the bucket's own collection do it: it knows unfinished uploads and old journals, too."""
    from dataclasses import asdict

    from kvtier.backends.s3 import S3Backend
    from kvtier.backends.s3_gc import collect

    backend = tier.build_backend()
    if not isinstance(backend, S3Backend):
        raise BackendError(f"tier {tier.name!r}: {backend!r} cannot be collected as a bucket")
    collecting = collect(backend, foreign=foreign, capacity=tier.capacity, dry_run=dry_run, deadline_seconds=seconds)
    return asdict(await collecting)


async def _collected(tier: TierConfig, seconds: float, tell: Callable[..., None], *, dry_run: bool) -> dict[str, int]:
    counts = dict.fromkeys(("seen", "seen_bytes", "expired", "over", "removed_bytes", "failed"), 0)
    async with opened_backend(tier, seconds=seconds) as backend:
        stats = await every(backend, seconds=seconds, what=f"tier {tier.name!r}")
        now = time.time()
        expired = [stat for stat in stats if stat.expires is not None and stat.expires <= now]
        over = _beyond([stat for stat in stats if stat.expires is None or stat.expires > now], tier.capacity)
        counts |= {"seen": len(stats), "seen_bytes": sum(stat.size for stat in stats)}
        counts |= {"expired": len(expired), "over": len(over)}
        doomed = [*expired, *over]
        counts["removed_bytes"] = sum(stat.size for stat in doomed)
        tell(0, len(doomed))
        for first in range(0, 0 if dry_run else len(doomed), BATCH):
            batch = doomed[first : first + BATCH]
            answers = await within(
                backend.delete_many([stat.name for stat in batch]),
                seconds,
                f"tier {tier.name!r} did not remove entries",
            )
            left = [stat for stat, answer in zip(batch, answers, strict=True) if isinstance(answer, BackendError)]
            counts["failed"] += len(left)
            counts["removed_bytes"] -= sum(stat.size for stat in left)
            tell(first + len(batch))
    return counts


def _beyond(entries: Sequence[Stat], capacity: int) -> list[Stat]:
    """Return the entries to remove so that the rest fits, those that changed longest ago first."""
    left = sum(stat.size for stat in entries)
    over = []
    for stat in sorted(entries, key=lambda stat: stat.changed):
        if left <= capacity:
            break
        over.append(stat)
        left -= stat.size
    return over

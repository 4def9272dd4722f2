"""`kvtier migrate`: the entries of one tier copied to another, of the same config or of another one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.ls import LIST_SECONDS
from kvtier.cli.migration import OUTCOMES, Migrated, Migration, Wishes
from kvtier.cli.output import human_bytes, print_json, progress
from kvtier.cli.tiers import ConfigOption, DeadlineOption, JsonOption, lasting, opened_backend, read_config
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.config import TierConfig

MOST_SHOWN = 20


def migrate(
    source: Annotated[str, typer.Argument(metavar="FROM", help="the tier to copy from")],
    target: Annotated[str, typer.Argument(metavar="TO", help="the tier to copy to")],
    config: ConfigOption = None,
    to_config: Annotated[Path | None, typer.Option(help="the config that TO is in, if it is another one")] = None,
    prefix: Annotated[str, typer.Option(help="copy keys that begin with this, literally")] = "",
    replace_older: Annotated[
        bool, typer.Option("--replace-older", help="write over entries that were put before the source's")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="read and count only")] = False,
    in_flight: Annotated[int, typer.Option(min=1, help="entries copied at once")] = 4,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Copy a tier's entries to another tier, verified at both ends. Stopped, it goes on where it was when run again."""
    here = read_config(config)
    there = here if to_config is None else read_config(to_config)
    tiers = lasting(here, source).tiers[0], lasting(there, target).tiers[0]
    if _same_place(*tiers):
        raise ConfigError(f"{source!r} and {target!r} are one place; there is nothing to copy")
    wishes = Wishes(
        prefix=prefix,
        replace_older=replace_older,
        lossless=there.lossless,
        dry_run=dry_run,
        in_flight=in_flight,
        seconds=deadline_seconds,
    )
    with progress(f"copying {source} to {target}", 1, shown=not json) as tell:
        result = asyncio.run(_migrated(tiers, wishes, tell))
    if json:
        print_json({"from": source, "to": target, "dry_run": dry_run, **result.plain()})
    else:
        _show(f"{source} to {target}", result, dry_run=dry_run)
    if not result.complete:
        raise typer.Exit(1)


def _same_place(source: TierConfig, target: TierConfig) -> bool:
    return source.backend == target.backend and source.options == target.options


async def _migrated(tiers: tuple[TierConfig, TierConfig], wishes: Wishes, tell: Callable[..., None]) -> Migrated:
    async with (
        opened_backend(tiers[0], seconds=wishes.seconds) as source,
        opened_backend(tiers[1], seconds=wishes.seconds) as target,
    ):
        return await Migration(tiers, (source, target), wishes, tell).run()


def _show(what: str, result: Migrated, *, dry_run: bool) -> None:
    print(f"{what}:{' (dry run)' if dry_run else ''}")
    for outcome in OUTCOMES:
        if result.counts[outcome] or outcome == "copied":
            size = f" ({human_bytes(result.copied_bytes)})" if outcome == "copied" else ""
            print(f"  {outcome.replace('_', ' ')}: {result.counts[outcome]:,}{size}")
    for name, why in list(result.wrong.items())[:MOST_SHOWN]:
        print(f"  {name}\n    {why}")
    if len(result.wrong) > MOST_SHOWN:
        print(f"  and {len(result.wrong) - MOST_SHOWN} more; --json lists all")
    if result.stopped:
        print(f"  stopped with {result.left:,} left: {result.stopped}")
        print("  make room (kvtier gc, kvtier rm, a larger capacity) and run it again: it goes on from here")

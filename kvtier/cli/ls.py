"""`kvtier ls`: the keys that the tiers hold."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.output import human_bytes, print_json
from kvtier.cli.tiers import ConfigOption, DeadlineOption, JsonOption, TierOption, lasting, read_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.config import StoreConfig
    from kvtier.store.results import ListEntry

LIST_SECONDS = 60.0


def ls(
    prefix: Annotated[str, typer.Argument(help="list keys that begin with this, literally")] = "",
    config: ConfigOption = None,
    tier: TierOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="list so many at most")] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="tell tiers and expiry, too")] = False,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """List the keys in the tiers that outlive a process, each once."""
    entries = asyncio.run(listed(lasting(read_config(config), tier), prefix, limit=limit, seconds=deadline_seconds))
    if json:
        print_json(
            [
                {"key": entry.key, "tiers": dict(entry.tiers), "expires": entry.expires, "lossy": entry.lossy}
                for entry in entries
            ]
        )
        return
    for entry in entries:
        print(f"{human_bytes(entry.size):>9}  {entry.key}")
        if long:
            print(f"{'':>11}{_where(entry)}")
    print(f"{len(entries)} keys, {human_bytes(sum(sum(entry.tiers.values()) for entry in entries))} in all tiers")


async def listed(config: StoreConfig, prefix: str, *, limit: int | None = None, seconds: float) -> Sequence[ListEntry]:
    """Return entries in the order of their keys.

    Raises:
        BackendError: a tier could not be listed; a part of the keys is never taken for all of them.
    """
    from kvtier.store.opening import open_chunks

    async with open_chunks(config, strict=True) as chunks:
        entries = [entry async for entry in chunks.list(prefix, deadline_seconds=seconds)]
    return sorted(entries, key=lambda entry: entry.key)[:limit]


def _where(entry: ListEntry) -> str:
    tiers = ", ".join(f"{name} {human_bytes(size)}" for name, size in entry.tiers.items())
    return f"{tiers}{'; lossy' if entry.lossy else ''}; {when(entry.expires)}"


def when(expires: float | None) -> str:
    """Return an expiry as people read it."""
    return "never expires" if expires is None else f"expires {moment(expires)}"


def moment(seconds: float) -> str:
    """Return a moment in UTC, to the second."""
    try:
        return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):  # further away than calendars go
        return f"{seconds:.0f} s after 1970"

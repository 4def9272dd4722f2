"""`kvtier rm`: entries deleted by key or by the beginning of their keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.ls import LIST_SECONDS
from kvtier.cli.output import print_json, progress
from kvtier.cli.tiers import ConfigOption, DeadlineOption, JsonOption, TierOption, lasting, read_config
from kvtier.errors import InvalidValueError
from kvtier.keys.names import check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.config import StoreConfig

BATCH = 200


def rm(
    keys: Annotated[list[str] | None, typer.Argument(help="keys, as `kvtier ls` prints them")] = None,
    prefix: Annotated[str | None, typer.Option(help="all keys that begin with this, literally; '' for all")] = None,
    config: ConfigOption = None,
    tier: TierOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask before a whole prefix goes")] = False,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Delete entries from the tiers that outlive a process; stores that run hear of it."""
    if bool(keys) == (prefix is not None):
        raise InvalidValueError("give keys, or --prefix, and not both")
    store = lasting(read_config(config), tier)
    chosen = [check_key(key) for key in keys or []]
    if prefix is not None:
        from kvtier.cli.ls import listed

        chosen = [entry.key for entry in asyncio.run(listed(store, prefix, seconds=deadline_seconds))]
        if chosen and not yes:
            typer.confirm(f"delete {len(chosen)} keys under {prefix!r}?", abort=True, err=True)
    gone = asyncio.run(_delete(store, chosen, deadline_seconds, shown=not json))
    absent = [key for key, there in zip(chosen, gone, strict=True) if not there]
    if json:
        print_json({"deleted": len(chosen) - len(absent), "absent": absent})
    else:
        typer.echo(f"{len(chosen) - len(absent)} keys deleted")
        for key in absent:
            typer.echo(f"kvtier: was not there: {key}", err=True)
    if absent and prefix is None:  # under a prefix somebody else was faster, and it is gone as asked
        raise typer.Exit(1)


async def _delete(store: StoreConfig, keys: Sequence[str], seconds: float, *, shown: bool) -> list[bool]:
    from kvtier.store.opening import open_chunks

    gone: list[bool] = []
    async with open_chunks(store, strict=True) as chunks:
        with progress("deleting", len(keys), shown=shown) as tell:
            for first in range(0, len(keys), BATCH):
                gone += await chunks.delete_many(keys[first : first + BATCH], deadline_seconds=seconds)
                tell(len(gone))
    return gone

"""`kvtier get` and `kvtier put`: one entry to a file and back, for debugging."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.ls import LIST_SECONDS
from kvtier.cli.output import print_json
from kvtier.cli.stored import Container, read_verified
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
from kvtier.errors import BackendError, ConfigError, InvalidValueError
from kvtier.keys.names import check_key, name_of

if TYPE_CHECKING:
    import torch

    from kvtier.config import StoreConfig


def get(
    key: Annotated[str, typer.Argument(help="a key, as `kvtier ls` prints it")],
    file: Annotated[str, typer.Argument(help="where to write the value; - for the screen")],
    config: ConfigOption = None,
    tier: TierOption = None,
    container: Annotated[bool, typer.Option("--container", help="write what is stored: header and payload")] = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Write a verified value to a file: bytes as they are, tensors as safetensors, KV with --container."""
    store = lasting(read_config(config), tier)
    stored = asyncio.run(_stored(store, check_key(key), deadline_seconds))
    if stored is None:
        typer.echo(f"kvtier: no tier holds {key!r}; see: kvtier ls", err=True)
        raise typer.Exit(1)
    if container:
        content = bytes(stored.stored)
    elif stored.header.kind == "kv":
        raise InvalidValueError(f"{key!r} holds {stored.header.tokens} tokens of KV; give --container for it as stored")
    else:
        content = asyncio.run(_value(store, key, deadline_seconds))
    if file == "-":
        sys.stdout.buffer.write(content)
    else:
        Path(file).write_bytes(content)


async def _stored(store: StoreConfig, key: str, seconds: float) -> Container | None:
    """Return the entry from the first tier that holds it."""
    for tier in store.tiers:
        async with opened_backend(tier, seconds=seconds) as backend:
            looking = backend.stat_many([name_of(key)])
            (answer,) = await within(looking, seconds, f"tier {tier.name!r} did not answer")
            if isinstance(answer, BackendError):
                raise answer
            if answer is not None:
                reading = read_verified(backend, answer, max_raw=tier.max_value_bytes)
                return await within(reading, seconds, f"entry {answer.name} was not read")
    return None


async def _value(store: StoreConfig, key: str, seconds: float) -> bytes:
    from kvtier.store.opening import open_chunks

    async with open_chunks(store, strict=True) as chunks:
        value = await chunks.get(key, deadline_seconds=seconds)
    if value is None:
        raise BackendError(f"{key!r} went while it was read")
    return value if isinstance(value, bytes) else _as_safetensors(value)


def _as_safetensors(value: torch.Tensor | dict[str, torch.Tensor]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError as exc:
        raise ConfigError(
            "tensors are written as safetensors: pip install safetensors, or give --container for what is stored"
        ) from exc
    named = value if isinstance(value, dict) else {"value": value}
    content: bytes = save({name: tensor.contiguous() for name, tensor in named.items()})
    return content


def put(
    key: Annotated[str, typer.Argument(help="the key; what stands under it is replaced")],
    file: Annotated[str, typer.Argument(help="the file to store; - for the standard input")],
    config: ConfigOption = None,
    tier: TierOption = None,
    ttl_seconds: Annotated[float | None, typer.Option(min=0.001, help="after this it is gone")] = None,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Store a file's bytes under a key, and wait until every tier has them."""
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    store = lasting(read_config(config), tier)
    through = tuple(each.model_copy(update={"write": "through"}) for each in store.tiers)  # there is none to demote
    store = store.model_copy(update={"tiers": through})
    asyncio.run(_put(store, check_key(key), content, ttl_seconds, deadline_seconds))
    tiers = [each.name for each in store.tiers]
    if json:
        print_json({"key": key, "bytes": len(content), "tiers": tiers})
    else:
        print(f"{len(content):,} bytes stored in {', '.join(tiers)}")


async def _put(store: StoreConfig, key: str, content: bytes, ttl: float | None, seconds: float) -> None:
    """Store in every tier; raises the `BackendError` of the first one that did not take it."""
    from kvtier.store.opening import open_chunks

    async with open_chunks(store, strict=True) as chunks:
        for tier in store.tiers:
            await chunks.put(key, content, wait=tier.name, ttl_seconds=ttl, deadline_seconds=seconds)
        flushed = await chunks.flush(deadline_seconds=seconds)
    for name, tier_flush in flushed.tiers.items():
        if tier_flush.failed or tier_flush.pending:
            raise BackendError(f"tier {name!r} did not take {key!r}: {tier_flush.last_error or 'not in time'}")

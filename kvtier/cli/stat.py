"""`kvtier stat`: what a tier holds in all, or all that is known of one key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.ls import LIST_SECONDS, moment, when
from kvtier.cli.output import human_bytes, print_json
from kvtier.cli.stored import read_header
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
from kvtier.cli.walking import pages
from kvtier.errors import BackendError, CorruptChunkError
from kvtier.keys.names import check_key, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.header import Header
    from kvtier.config import TierConfig


def stat(
    key: Annotated[str | None, typer.Argument(help="a key, as `kvtier ls` prints it; none for the tiers")] = None,
    config: ConfigOption = None,
    tier: TierOption = None,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = LIST_SECONDS,
) -> None:
    """Tell what each tier holds, or where a key stands and what its entry says of itself."""
    tiers = lasting(read_config(config), tier).tiers
    if key is None:
        held = {each.name: asyncio.run(_held(each, deadline_seconds)) for each in tiers}
        if json:
            print_json(held)
        else:
            for name, figures in held.items():
                _show(name, figures)
        return
    check_key(key)
    found = {each.name: asyncio.run(_found(each, key, deadline_seconds)) for each in tiers}
    there = {name: facts for name, facts in found.items() if facts is not None}
    if json:
        print_json({"key": key, "tiers": there})
    else:
        print(key)
        for name, facts in there.items():
            _show(name, facts)
    if not there:
        typer.echo(f"kvtier: no tier holds {key!r}; see: kvtier ls", err=True)
    if not there or any("damage" in facts for facts in there.values()):
        raise typer.Exit(1)


async def _held(tier: TierConfig, seconds: float) -> dict[str, object]:
    """Return how many entries a medium holds, and how full it is."""
    entries = size = expiring = 0
    async with opened_backend(tier, seconds=seconds) as backend:
        async for page in pages(backend, seconds=seconds, what=f"tier {tier.name!r}"):
            entries += len(page)
            size += sum(stat.size for stat in page)
            expiring += sum(stat.expires is not None for stat in page)
    return {
        "backend": str(tier.backend),
        "entries": entries,
        "bytes": size,
        "capacity_bytes": tier.capacity,
        "with_expiry": expiring,
    }


async def _found(tier: TierConfig, key: str, seconds: float) -> dict[str, object] | None:
    async with opened_backend(tier, seconds=seconds) as backend:
        looking = backend.stat_many([name_of(key)])
        (answer,) = await within(looking, seconds, f"tier {tier.name!r} did not answer")
        if isinstance(answer, BackendError):
            raise answer
        if answer is None:
            return None
        facts: dict[str, object] = {
            "name": answer.name,
            "bytes": answer.size,
            "expires": answer.expires,
            "changed": answer.changed,
        }
        try:
            header = await within(read_header(backend, answer), seconds, f"tier {tier.name!r} did not answer")
        except CorruptChunkError as exc:
            return facts | {"damage": str(exc)}
        return facts | _said(header)


def _said(header: Header) -> dict[str, object]:
    return {
        "kind": header.kind,
        "namespace": header.namespace,
        "parent": header.parent,
        "tokens": header.tokens,
        "created": header.created,
        "lossy": header.lossy,
        "epoch": header.epoch,
        "codecs": [{"name": ref.name, **ref.options} for ref in header.chain],
        "raw_bytes": header.raw,
        "segments": [
            {
                "name": segment.spec.name,
                "dtype": segment.spec.dtype,
                "shape": list(segment.spec.shape),
                "stored_bytes": segment.stored,
            }
            for segment in header.segments
        ],
    }


def _show(name: str, facts: Mapping[str, object]) -> None:
    print(f"{name}:")
    for fact, value in facts.items():
        if value not in (None, "", []):
            for line in _lines(fact, value):
                print(f"  {line}")


def _lines(fact: str, value: object) -> list[str]:
    if fact == "expires" and isinstance(value, float):
        return [f"{fact}: {when(value).removeprefix('expires ')}"]
    if fact in {"changed", "created"} and isinstance(value, float):
        return [f"{fact}: {moment(value)}"]
    if "bytes" in fact and isinstance(value, int):
        return [f"{fact}: {value:,} ({human_bytes(value)})"]
    if fact == "segments" and isinstance(value, list):
        return [
            f"segment {item['name'] or '-'}: {item['dtype']} {item['shape']}, {item['stored_bytes']:,} bytes stored"
            for item in value
        ]
    if fact == "codecs" and isinstance(value, list):
        return [f"codec: {', '.join(str(part) for part in item.values())}" for item in value]
    return [f"{fact}: {value}"]

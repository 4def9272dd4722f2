"""What commands open: a config's tiers that outlive the process, as one store or one backend at a time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvtier.backends.base import BackendContext
from kvtier.buffers.arena import Arena
from kvtier.concurrency.clock import SystemClock
from kvtier.concurrency.workers import Workers
from kvtier.errors import BackendError, BackendTimeoutError, ConfigError
from kvtier.events import Events
from kvtier.registry import nearest_first
from kvtier.tier.guarded import GuardedBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from typing import TypeVar

    from kvtier.backends.base import Backend
    from kvtier.concurrency.clock import Clock
    from kvtier.config import StoreConfig, TierConfig
    from kvtier.events import Observer

    T = TypeVar("T")

DEFAULT_FILE = "kvtier.toml"
ARENA_BYTES = 4 << 20
CLOSE_SECONDS = 5.0

ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="KVTIER_CONFIG", help=f"the store's config; {DEFAULT_FILE} here, else the default one"
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="print JSON")]
TierOption: TypeAlias = Annotated[str | None, typer.Option("--tier", "-t", help="look at this tier alone")]
DeadlineOption: TypeAlias = Annotated[float, typer.Option("--deadline-seconds", min=0.001, help="for each step")]


def config_source(path: Path | None) -> Path | None:
    """Return the file that a command reads: the one given, else the one in the working directory, else None."""
    if path is not None:
        return path
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def read_config(path: Path | None) -> StoreConfig:
    """Return the checked config of a command; raises `ConfigError`."""
    from kvtier.config import load_config  # pydantic's models take a while to make: not for a `--help`

    return load_config(config_source(path))


def outlives(tier: TierConfig) -> bool:
    """Tell whether what the tier holds is still there when the process that stored it has ended."""
    traits = tier.build_backend().traits
    return traits.persistent or traits.shared


def lasting(config: StoreConfig, tier: str | None = None) -> StoreConfig:
    """Return the config with those tiers alone that outlive a process, or with the one tier that is named.

    Raises:
        ConfigError: there is none, or no tier has this name.
    """
    if tier is not None:
        chosen = find_tier(config, tier)
        if not outlives(chosen):
            raise ConfigError(f"tier {tier!r} is memory: what it holds ends with the process that stored it")
        return config.model_copy(update={"tiers": (chosen,)})
    tiers = tuple(each for each in config.tiers if outlives(each))
    if not tiers:
        raise ConfigError("no tier of this config outlives the process that stored in it; there is nothing to look at")
    return config.model_copy(update={"tiers": tiers})


def find_tier(config: StoreConfig, name: str) -> TierConfig:
    """Return the tier called `name`; raises `ConfigError` that names those there are."""
    for tier in config.tiers:
        if tier.name == name:
            return tier
    raise ConfigError(f"no tier {name!r}; there are: {', '.join(nearest_first(name, (t.name for t in config.tiers)))}")


@asynccontextmanager
async def opened_backend(
    tier: TierConfig, *, seconds: float, clock: Clock | None = None, observer: Observer | None = None
) -> AsyncIterator[Backend]:
    """Open a tier's backend alone, with threads of its own and no index: nothing is evicted, promoted or journaled.

    Raises:
        ConfigError, BackendError: it does not open, or not within `seconds`.
    """
    clock = clock or SystemClock()
    workers = Workers(f"kvtier-{tier.name}", tier.threads, job_seconds=seconds)
    arena = Arena(ARENA_BYTES, staging=0, pin=False)
    backend = GuardedBackend(tier.build_backend())
    context = BackendContext(
        tier=tier.name,
        workers=workers,
        clock=clock,
        events=Events(observer, clock),
        arena=arena,
        capacity=tier.capacity,
        deadline_seconds=seconds,
    )
    try:
        await within(backend.open(context), seconds, f"tier {tier.name!r} did not open")
        yield backend
    finally:
        try:
            await within(backend.aclose(), CLOSE_SECONDS, f"tier {tier.name!r} did not close")
        finally:
            await workers.aclose(CLOSE_SECONDS)
            arena.close()


async def within(work: Awaitable[T], seconds: float, what: str) -> T:
    """Return what `work` gives; raises `BackendTimeoutError` beginning with `what` if that takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except BackendError:
        raise
    except TimeoutError as exc:
        raise BackendTimeoutError(f"{what} within {seconds:g} s") from exc

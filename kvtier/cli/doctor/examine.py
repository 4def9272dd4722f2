"""The whole examination: the config, the machine's memory, then each tier that can be opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.cli.doctor.bucket import check_bucket
from kvtier.cli.doctor.device import check_device
from kvtier.cli.doctor.disk import check_disk
from kvtier.cli.doctor.finding import Finding
from kvtier.cli.doctor.memory import check_memory
from kvtier.cli.doctor.plan import check_plan
from kvtier.cli.doctor.redis_server import check_redis
from kvtier.cli.doctor.round_trip import Speeds, check_round_trip
from kvtier.cli.output import human_bytes
from kvtier.cli.tiers import opened_backend
from kvtier.concurrency.clock import SystemClock
from kvtier.config import InvalidConfigError, load_config
from kvtier.errors import BackendError, BackendTimeoutError, ConfigError
from kvtier.planner import Link, Prefill

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.backends.base import Backend
    from kvtier.concurrency.clock import Clock
    from kvtier.config import StoreConfig, TierConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What to look at, and how.

    Attributes:
        source: the config file; None for the default config.
        bytes_per_token: of KV; None where the layout is not known.
        prefill: what loading competes with.
        seconds: for each step.
        clock: this machine's.
        links: takes the speed of each tier that was measured.
    """

    source: Path | None
    bytes_per_token: float | None = None
    prefill: Prefill = field(default_factory=lambda: Prefill.from_speed(10_000.0))
    seconds: float = 10.0
    clock: Clock = field(default_factory=SystemClock)
    links: dict[str, Link] = field(default_factory=dict)


async def examine(patient: Patient) -> list[Finding]:
    """Return everything found, worst things included; raises nothing for what is wrong with config or media."""
    try:
        config = load_config(patient.source)
    except InvalidConfigError as exc:
        return [Finding(level="problem", check="config", text=str(problem)) for problem in exc.problems]
    except ConfigError as exc:
        return [Finding(level="problem", check="config", text=str(exc))]
    known = patient.bytes_per_token
    chunk = None if known is None else int(known * config.chunk_tokens)
    found = [*check_plan(config, chunk_bytes=chunk), *check_memory(config)]
    for tier in config.tiers:
        findings, speeds = await _tier(tier, patient)
        found += findings
        if speeds is not None:
            patient.links[tier.name] = Link(
                latency_seconds=speeds.read_seconds, bytes_per_second=speeds.read_bytes_per_second
            )
            if chunk is not None:
                found.append(_break_even(config, tier, speeds, chunk, patient.prefill))
    return found


async def _tier(tier: TierConfig, patient: Patient) -> tuple[list[Finding], Speeds | None]:
    try:
        if tier.backend == "pinned-cpu":
            return [], None  # `check_memory` has looked
        if tier.backend == "cuda":
            return [check_device(tier)], None
        async with opened_backend(tier, seconds=patient.seconds, clock=patient.clock) as backend:
            found = [Finding(level="ok", check="reach", tier=tier.name, text="opens")]
            found += await _settings(tier, backend, patient)
            more, speeds = await check_round_trip(tier, backend, seconds=patient.seconds, clock=patient.clock)
            told = any(finding.check == "clock" for finding in found)
            return [*found, *(each for each in more if not (told and each.check == "clock"))], speeds
    except ConfigError as exc:
        return [Finding(level="problem", check="open", tier=tier.name, text=str(exc), fix="correct the option")], None
    except BackendError as exc:
        slow = isinstance(exc, BackendTimeoutError)
        fix = (
            "see whether the server hangs, or give more --deadline-seconds"
            if slow
            else "start it, or correct where it is"
        )
        if tier.required:
            fix += "; required = false lets the store open without this tier"
        return [Finding(level="problem", check="reach", tier=tier.name, text=str(exc), fix=fix)], None


async def _settings(tier: TierConfig, backend: Backend, patient: Patient) -> list[Finding]:
    """Ask what only one kind of backend has."""
    if tier.backend == "redis":
        return list(await check_redis(tier, seconds=patient.seconds, clock=patient.clock))
    if tier.backend == "s3":
        return list(await check_bucket(tier, seconds=patient.seconds))
    if tier.backend == "local-disk":
        held = 0
        async for page in backend.scan():
            held += sum(stat.size for stat in page)
        return list(check_disk(tier, held_bytes=held, figures=backend.figures()))
    return []


def _break_even(config: StoreConfig, tier: TierConfig, speeds: Speeds, chunk: int, prefill: Prefill) -> Finding:
    load, compute = speeds.seconds_to_read(chunk), prefill.seconds(config.chunk_tokens)
    said = (
        f"a chunk ({human_bytes(chunk)}) loads in {load * 1e3:.2f} ms, one at a time; "
        f"computing it takes {compute * 1e3:.2f} ms at {config.chunk_tokens / compute:,.0f} tokens/s"
    )
    if load < compute:
        return Finding(level="ok", check="break-even", tier=tier.name, text=said)
    return Finding(
        level="warning",
        check="break-even",
        tier=tier.name,
        text=f"{said}: loading costs more than it saves",
        fix="use a codec or a faster link, or leave this tier out",
    )

"""What a running store's metrics say, taken apart: one moment, and what changed since the one before."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvtier.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LARGEST_SCRAPE = 16 << 20
FIRST_TOKEN = ("kvtier_first_token_seconds", "vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
STATES: dict[float, str] = {0.0: "closed", 1.0: "half-open", 2.0: "open"}

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape: `values` by series name and sorted labels, taken at `when` (seconds of one clock)."""

    when: float
    values: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Return one series, 0 if there is none."""
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a name that have these labels."""
        wanted = labels.items()
        return sum(value for (each, has), value in self.values.items() if each == name and wanted <= dict(has).items())

    def labels(self, name: str, label: str) -> list[str]:
        """Return the values of a label among the series of a name, in the order of the scrape."""
        found = (dict(has).get(label) for each, has in self.values if each == name)
        return list(dict.fromkeys(value for value in found if value is not None))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, all series with these labels together."""
        wanted, counts = labels.items(), dict[float, float]()
        for (each, has), value in self.values.items():
            marks = dict(has)
            if each == f"{name}_bucket" and wanted <= marks.items():
                bound = float(marks["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return counts


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return the bound that `share` of a histogram kept; None if it is empty or that is beyond all bounds."""
    whole = max(buckets.values(), default=0.0)
    if not whole:
        return None
    bound = next(bound for bound, count in sorted(buckets.items()) if count >= share * whole)
    return bound if math.isfinite(bound) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """One tier as `kvtier top` shows it. Rates are per second since the sample before, None without one."""

    name: str
    up: bool
    breaker: str
    bytes: int
    capacity: int
    hits: int
    lookups: int
    corrupt: int
    errors: int
    evicted: int
    dropped: int
    hit_rate: float | None
    read_bytes_per_second: float | None
    written_bytes_per_second: float | None
    written_bytes_per_hit: float | None
    read_p99_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A whole store, and its server where that tells of its requests."""

    tiers: list[TierView]
    requests: int | None
    first_token_p50_seconds: float | None
    first_token_p99_seconds: float | None
    tokens_loaded: int | None
    tokens_computed: int | None
    memory_bytes: int
    corrupt: int = field(default=0)


def view(now: Sample, before: Sample | None) -> View:
    """Return what two samples say; a counter that went back (a restart) begins anew."""
    tiers = [_tier(name, now, before) for name in now.labels("kvtier_tier_up", "tier")]
    first = next((name for name in FIRST_TOKEN if now.buckets(name)), None)
    buckets = now.buckets(first) if first is not None else {}
    told = bool(now.labels("kvtier_prompt_tokens_total", "result"))
    return View(
        tiers=tiers,
        requests=int(max(buckets.values())) if buckets else None,
        first_token_p50_seconds=quantile(buckets, 0.5),
        first_token_p99_seconds=quantile(buckets, 0.99),
        tokens_loaded=int(now.value("kvtier_prompt_tokens_total", result="loaded")) if told else None,
        tokens_computed=int(now.value("kvtier_prompt_tokens_total", result="computed")) if told else None,
        memory_bytes=int(now.value("kvtier_memory_bytes", op="arena") + now.value("kvtier_memory_bytes", op="results")),
        corrupt=sum(tier.corrupt for tier in tiers),
    )


def _tier(name: str, now: Sample, before: Sample | None) -> TierView:
    lookups = now.total("kvtier_lookups_chunks_total", tier=name)
    hits = now.value("kvtier_lookups_chunks_total", tier=name, result="hit")
    failed = ("error", "timeout")
    return TierView(
        name=name,
        up=now.value("kvtier_tier_up", tier=name) > 0,
        breaker=STATES.get(now.value("kvtier_breaker_state", tier=name), "?"),
        bytes=int(now.value("kvtier_usage_bytes", tier=name)),
        capacity=int(now.value("kvtier_capacity_bytes", tier=name)),
        hits=int(hits),
        lookups=int(lookups),
        corrupt=int(now.value("kvtier_lookups_chunks_total", tier=name, result="corrupt")),
        errors=int(
            sum(now.value("kvtier_lookups_chunks_total", tier=name, result=each) for each in failed)
            + now.total("kvtier_failed_writes_chunks_total", tier=name)
        ),
        evicted=int(now.value("kvtier_departures_chunks_total", tier=name, result="evicted")),
        dropped=int(now.total("kvtier_drops_chunks_total", tier=name)),
        hit_rate=hits / lookups if lookups else None,
        read_bytes_per_second=_rate(now, before, name, "read"),
        written_bytes_per_second=_rate(now, before, name, "write"),
        written_bytes_per_hit=now.value("kvtier_transfers_bytes_total", tier=name, op="write") / hits if hits else None,
        read_p99_seconds=quantile(now.buckets("kvtier_operation_seconds", tier=name, op="read"), 0.99),
    )


def _rate(now: Sample, before: Sample | None, tier: str, op: str) -> float | None:
    if before is None or now.when <= before.when:
        return None
    moved, earlier = (each.value("kvtier_transfers_bytes_total", tier=tier, op=op) for each in (now, before))
    return (moved - earlier if moved >= earlier else moved) / (now.when - before.when)


def read_source(source: str, *, seconds: float) -> str:
    """Return the text of a scrape: of an `http(s)` URL, or of a file.

    Raises:
        ConfigError: neither of both.
        BackendUnavailableError: nobody answers there, or not with metrics.
    """
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError):
            raise ConfigError(
                f"{source!r} is no file; write the address of a metrics endpoint, such as http://127.0.0.1:9400/metrics"
            ) from None
    try:
        with urllib.request.urlopen(source, timeout=seconds) as answer:  # noqa: S310  # http or https, looked at above
            text: str = answer.read(LARGEST_SCRAPE).decode("utf-8", "replace")
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError) as exc:
        why = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise BackendUnavailableError(
            f"{source}: {why}; is the server running, and does it show metrics there?"
        ) from exc
    return text


def parse(text: str, *, when: float) -> Sample:
    """Take a scrape apart; raises `ConfigError` if it is none, or has nothing of kvtier's."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ConfigError("kvtier top needs prometheus-client: pip install 'kvtier[cli]'") from None
    try:
        values = dict(_series(text_string_to_metric_families(text)))
    except (ValueError, KeyError, IndexError) as exc:
        raise ConfigError(f"what came is no Prometheus text: {exc}") from None
    sample = Sample(when, values)
    if not sample.labels("kvtier_tier_up", "tier"):
        raise ConfigError(
            "there are no metrics of a kvtier store; register a StoreCollector, see docs/how-to/metrics.md"
        )
    return sample


def _series(families: Iterable[object]) -> Iterable[tuple[tuple[str, Labels], float]]:
    for family in families:
        for sample in getattr(family, "samples", ()):
            yield (sample.name, tuple(sorted(sample.labels.items()))), float(sample.value)

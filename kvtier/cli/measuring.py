"""One tier measured as a store uses it: KV put and got through its codecs, all of it removed again."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.tensors import TORCH_DTYPES
from kvtier.cli.tiers import outlives
from kvtier.errors import BackendError, ConfigError, KVTierError
from kvtier.keys.namespace import Namespace
from kvtier.store.opening import open_store

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from kvtier.chunk.layout import KVLayout
    from kvtier.config import StoreConfig, TierConfig
    from kvtier.store.kv import KVStore

KEPT_SECONDS = 600.0  # what a killed measurement leaves removes itself
DIFFERENT = 4  # values that are put by turns; no medium looks for equal ones
FREE_SHARE = 0.5  # of a volume's free bytes that a measurement may take
WARM_UP = 1_000_000_000  # number of the chunk that is moved first, and not timed
SLACK = 1.02  # of a value's bytes that container and rounding may add
OUTLIER_EVERY, OUTLIER = 16, 8.0  # keys of real models have a few channels that are much larger than the others


@dataclass(slots=True, kw_only=True)
class Measured:
    """One tier's figures; bytes are those of the KV itself, before any codec.

    Attributes:
        put_seconds, get_seconds: of each chunk moved alone.
        put_bytes_per_second, get_bytes_per_second: with several under way.
        stored_ratio: bytes in the tier over bytes of KV.
        problem: why there is no figure, or what is wrong with them; empty if all went well.
    """

    tier: str
    backend: str
    codecs: list[str]
    chunks: int = 0
    put_seconds: list[float] = field(default_factory=list)
    get_seconds: list[float] = field(default_factory=list)
    put_bytes_per_second: float = 0.0
    get_bytes_per_second: float = 0.0
    stored_ratio: float = 0.0
    problem: str = ""

    def plain(self) -> dict[str, object]:
        """Return the figures as plain values: medians and the worst in place of every single time."""
        return {
            "tier": self.tier,
            "backend": self.backend,
            "codecs": self.codecs,
            "chunks": self.chunks,
            "put_bytes_per_second": self.put_bytes_per_second,
            "get_bytes_per_second": self.get_bytes_per_second,
            "put_seconds": _summary(self.put_seconds),
            "get_seconds": _summary(self.get_seconds),
            "stored_ratio": self.stored_ratio,
            "problem": self.problem,
        }


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": statistics.median(seconds), "max": max(seconds)} if seconds else {}


class Measurement:
    """What is put into each tier, and how."""

    def __init__(
        self, config: StoreConfig, layout: KVLayout, *, total_bytes: int, in_flight: int, seconds: float
    ) -> None:
        self._config = config
        self._layout = layout
        self._in_flight = in_flight
        self._seconds = seconds
        self.chunk_bytes: int = layout.bytes_per_token() * config.chunk_tokens
        self.chunks: int = max(total_bytes // (2 * self.chunk_bytes), 1)  # moved alone, and as many in parallel
        self.steps: int = 4 * self.chunks
        self._values = [_like_real(layout, config.chunk_tokens) for _ in range(min(DIFFERENT, self.chunks))]

    async def of(self, tier: TierConfig, tell: Callable[[], None]) -> Measured:
        """Measure one tier; whatever ends this, also a cancellation, the entries are removed first."""
        measured = Measured(tier=tier.name, backend=str(tier.backend), codecs=[codec.name for codec in tier.codecs])
        alone = self._alone(tier)
        namespace = Namespace(model="kvtier bench", revision=secrets.token_hex(8))
        try:
            async with open_store(alone, layout=self._layout, namespace=namespace, strict=True) as store:
                if refusal := self._refusal(store, tier):
                    measured.problem = refusal
                    return measured
                try:
                    await self._measure(store, measured, tell)
                finally:
                    await store.clear(deadline_seconds=self._seconds)
        except KVTierError as exc:
            if isinstance(exc, ConfigError):
                raise
            measured.problem = str(exc)
        return measured

    def _alone(self, tier: TierConfig) -> StoreConfig:
        """Return a config with this tier only; one in memory gets what is needed and no more."""
        changes: dict[str, object] = {"write": "through", "required": True, "on_full": "wait", "warm": None}
        if not outlives(tier):
            room = int((2 * self.chunks + self._in_flight + 2) * self.chunk_bytes * SLACK) + (1 << 20)
            changes["capacity"] = min(tier.capacity, room)
        return self._config.model_copy(
            update={"tiers": (tier.model_copy(update=changes),), "shares": {}, "namespace": None}
        )

    def _refusal(self, store: KVStore, tier: TierConfig) -> str:
        """Return why this tier is not measured: nothing that somebody stored shall be evicted for it."""
        stats = store.stats().tiers[tier.name]
        need = int((2 * self.chunks + 1) * self.chunk_bytes * SLACK)
        if stats.bytes + need > stats.capacity:
            return f"{need} bytes would not fit beside the {stats.bytes} it holds; give a smaller --total"
        path: pathlib.Path | None = getattr(tier, "options", {}).get("path")
        if path is not None and need > shutil.disk_usage(path).free * FREE_SHARE:
            return f"{need} bytes are more than half of what the volume has free; give a smaller --total"
        return ""

    async def _measure(self, store: KVStore, measured: Measured, tell: Callable[[], None]) -> None:
        tier, count = measured.tier, self.chunks
        wrong = 0

        async def put(number: int) -> None:
            value = self._values[number % len(self._values)]
            done = await store.put(
                self._tokens(number), value, wait=tier, ttl_seconds=KEPT_SECONDS, deadline_seconds=self._seconds
            )
            if done.count("dropped"):
                raise BackendError(f"a chunk was not stored: {done.chunks[0].reason}")
            if number != WARM_UP:
                tell()

        async def get(number: int) -> None:
            nonlocal wrong
            hit = await store.get(self._tokens(number), deadline_seconds=self._seconds)
            if hit is None:
                raise BackendError("a chunk that was stored is gone")
            if not hit.lossy and number % count == 0:  # some, so that comparing is not what takes the time
                wrong += not _equal(hit.kv, self._values[number % len(self._values)])
            if number != WARM_UP:
                tell()

        await put(WARM_UP)  # compilers, first page faults, connections
        await get(WARM_UP)
        measured.put_seconds = [await _timed(put(number)) for number in range(count)]
        measured.get_seconds = [await _timed(get(number)) for number in range(count)]
        others, size = range(count, 2 * count), count * self.chunk_bytes
        measured.put_bytes_per_second = size / await _timed(self._together(put, others))
        measured.get_bytes_per_second = size / await _timed(self._together(get, others))
        measured.chunks = 2 * count
        written = store.stats().tiers[tier].counters["written_bytes"]
        measured.stored_ratio = (written if isinstance(written, int) else 0) / (2 * size + self.chunk_bytes)
        if wrong:
            measured.problem = f"{wrong} chunks came back with other values than were put"

    async def _together(self, work: Callable[[int], Awaitable[None]], numbers: Sequence[int]) -> None:
        places = asyncio.Semaphore(self._in_flight)

        async def one(number: int) -> None:
            async with places:
                await work(number)

        try:
            async with asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(one(number))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _tokens(self, number: int) -> list[int]:
        return [number, *range(self._config.chunk_tokens - 1)]


async def _timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def _like_real(layout: KVLayout, tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return KV with the spread of a real model's: channels of different size, a few of them far outside."""
    return {
        group.name: {
            spec.name: _channels(spec.shape, outliers=spec.name != "v").to(TORCH_DTYPES[spec.dtype])
            for spec in layout.specs(group.name, tokens=tokens, first_token=0)
        }
        for group in layout.groups
    }


def _channels(shape: Sequence[int], *, outliers: bool) -> torch.Tensor:
    scale = torch.rand(shape[-1]) + 0.5
    if outliers:
        scale[::OUTLIER_EVERY] *= OUTLIER
    return torch.randn(*shape) * scale


def _equal(found: object, put: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
    """Tell whether a hit holds what was put; of a windowed group it holds the last tokens only."""
    groups = {next(iter(put)): found} if len(put) == 1 else found
    assert isinstance(groups, dict)  # noqa: S101  # what a hit's `kv` is
    for name, tensors in put.items():
        for each, tensor in tensors.items():
            got = groups[name][each]
            if not torch.equal(got, tensor[:, tensor.shape[1] - got.shape[1] :]):
                return False
    return True

"""What the public calls return, as plain frozen values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    TensorsByName: TypeAlias = Mapping[str, torch.Tensor]
    from kvtier.store.exchange import KVSource, KVTarget

    KV: TypeAlias = TensorsByName | Mapping[str, TensorsByName]
    PutKV: TypeAlias = KV | KVSource
    OutKV: TypeAlias = KV | KVTarget

Status = Literal["stored", "present", "queued", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPut:
    """What became of one chunk: `stored` in the top tier, `present` already, `queued` on its way, `dropped` (why)."""

    key: str
    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """One item per chunk, in order; `skipped` counts incomplete chunks that were not stored."""

    chunks: tuple[ChunkPut, ...]
    skipped: int = 0

    def count(self, status: Status) -> int:
        """Return how many chunks have this status."""
        return sum(chunk.status == status for chunk in self.chunks)

    def __str__(self) -> str:
        counts = Counter(chunk.status for chunk in self.chunks)
        return ", ".join(f"{number} {status}" for status, number in sorted(counts.items())) or "nothing to store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The longest usable cached prefix.

    Attributes:
        num_tokens: tokens from position 0 that are covered.
        start: first position in `kv`.
        kv: tensors as `KVLayout` shapes them, of tokens [start, num_tokens); `{group: {...}}` with several groups. A
            windowed group holds only its last min(window - 1, num_tokens - start) tokens.
        lossy: whether any chunk went through a lossy codec; pass it to the `put` of what is computed on top.
        tiers: chunks served per tier.
        complete: False if a deadline or a fault cut the run that is cached.
        event: CUDA event after which `kv` is valid on the device, if one was asked for.
    """

    num_tokens: int
    start: int
    kv: KV
    lossy: bool
    tiers: Mapping[str, int]
    complete: bool
    event: object | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntry:
    """One key and where it stands: bytes per tier, expiry in wall-clock seconds."""

    key: str
    tiers: Mapping[str, int]
    expires: float | None = None
    lossy: bool | None = None

    @property
    def size(self) -> int:
        """Bytes in the uppermost tier that has it."""
        return next(iter(self.tiers.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFlush:
    """Of the values sent to one tier since the last flush: how many are stored there, failed, or still wait."""

    stored: int = 0
    failed: int = 0
    pending: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushResult:
    """Per tier; `complete` when nothing failed and nothing waits."""

    tiers: Mapping[str, TierFlush]

    @property
    def complete(self) -> bool:
        """Whether everything asked for is stored."""
        return all(not tier.failed and not tier.pending for tier in self.tiers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How long operations took: `counts[i]` of them at most `bounds[i]` seconds and more than the bound before."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    total_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier's state and exact counts (`kvtier.tier.counters.Counters`); `capacity` is in bytes."""

    name: str
    backend: str
    bytes: int
    capacity: int
    entries: int
    pinned: int
    up: bool
    health: str
    last_error: str
    in_flight_bytes: int = 0
    queued_bytes: int = 0
    queued: int = 0
    counters: Mapping[str, int | Mapping[str, int]] = field(default_factory=dict)
    read_seconds: Mapping[str, float] = field(default_factory=dict)  # "p50", "p99", "mean" of reads from the medium
    write_seconds: Mapping[str, float] = field(default_factory=dict)
    read_histogram: Histogram = field(default_factory=Histogram)
    write_histogram: Histogram = field(default_factory=Histogram)
    medium: Mapping[str, int | float | str] = field(default_factory=dict)  # what the backend tells of itself

    @property
    def written_bytes_per_hit(self) -> float | None:
        """What the medium wears for each use of it; None before the first hit."""
        written, hits = self.counters["written_bytes"], self.counters["hits"]
        return written / hits if isinstance(written, int) and isinstance(hits, int) and hits else None

    def __getattr__(self, name: str) -> int | Mapping[str, int]:
        """Give each counter as an attribute: `stats.tiers["local-disk"].hits`."""
        counters: Mapping[str, int | Mapping[str, int]] = object.__getattribute__(self, "counters")
        try:
            return counters[name]
        except KeyError:
            msg = f"no figure {name!r}; known: {', '.join(counters)}"
            raise AttributeError(msg) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Host memory the store holds, in bytes."""

    arena_capacity: int
    arena_used: int
    arena_high_water: int
    arena_waiting: int
    arena_prefaulted: bool
    arena_huge_bytes: int  # in pages of 2 MiB, when all of it was backed
    numa_node: int | None  # preferred for the arena; None: no choice, or none made
    pinned: bool
    locked: bool
    results: int
    results_budget: int
    leased: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A store's figures at one moment."""

    tiers: Mapping[str, TierStats]
    memory: MemoryStats
    reads_under_way: int
    tasks: int

    @property
    def bytes(self) -> int:
        """Bytes in all tiers together."""
        return sum(tier.bytes for tier in self.tiers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How full the store is, each from 0.0 to 1.0: what a scheduler looks at before it puts more."""

    arena: float
    results: float
    queues: Mapping[str, float]
    tiers: Mapping[str, float]

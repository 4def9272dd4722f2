"""A store's settings as the engine uses them, detached from how they were configured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.codecs.chain import CodecChain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.backends.base import Backend
    from kvtier.codecs.base import Codec
    from kvtier.planner import Link
    from kvtier.policies.base import Policy
    from kvtier.tier.settings import TierSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """What one tier is made of; the backend is not open yet."""

    settings: TierSettings
    backend: Backend
    policy: Policy
    chain: CodecChain = field(default_factory=CodecChain)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes in bytes, times in seconds."""

    deadline_seconds: float = 5.0
    close_seconds: float = 10.0
    coherence_seconds: float = 30.0
    strict: bool = False
    lossless: bool = False
    staging_bytes: int = 64 << 20  # memory for values on their way, beside the memory tiers' capacity
    result_bytes: int = 1 << 30  # memory for what `get` returns without `out`
    lease_share: float = 0.5
    huge_pages: bool = True  # of the arena
    numa_node: int | None = None  # likewise
    lock_memory: bool = False  # keep the arena in RAM where it is not registered with CUDA
    lease_seconds: float = 300.0
    copy_threads: int = 4
    codecs: Mapping[str, type[Codec]] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)  # by tier: what was measured before

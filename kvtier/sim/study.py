"""A study: one trace through many policies and capacities, each result with what the best choice could have reached."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.registry import policies
from kvtier.sim.optimum import endless_hits, optimal_hits
from kvtier.sim.replay import Replay
from kvtier.sim.tier import SimTier
from kvtier.sim.timing import OTHER_LINK, first_tokens
from kvtier.tier.settings import TierSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.planner import Link
    from kvtier.policies.base import Policy
    from kvtier.sim.replay import Outcome
    from kvtier.sim.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTier:
    """A tier to simulate: its settings (capacity in bytes), its policy as a maker, and how fast it is."""

    settings: TierSettings
    policy: str
    make_policy: Callable[[], Policy]
    link: Link = OTHER_LINK

    @classmethod
    def of(cls, policy: str, *, capacity: int, name: str = "tier", link: Link = OTHER_LINK) -> SimulatedTier:
        """Return a tier with a policy that needs no options. Raises `UnknownPluginError` for an unknown one."""
        return cls(
            settings=TierSettings(name=name, capacity=capacity),
            policy=policy,
            make_policy=policies.load(policy),
            link=link,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a study keeps the same for every run."""

    block_bytes: int
    tokens_per_second: float = 10_000.0
    full_blocks: bool = False
    hints: bool = False
    optimum: bool = True


class Study:
    """Runs configurations of tiers over one trace; what depends on the trace alone is worked out once."""

    def __init__(self, trace: Trace, setting: Setting) -> None:
        self.trace = trace
        self.setting = setting
        self._prefixes = [r.keys[: r.full] if setting.full_blocks else r.keys for r in trace.requests]
        self._optimal: dict[int, int] = {}
        self._endless: int | None = None

    def describe(self) -> dict[str, object]:
        """Return the trace in figures."""
        trace = self.trace
        seconds = trace.requests[-1].seconds - trace.requests[0].seconds
        return {
            "name": trace.name,
            "requests": len(trace.requests),
            "blocks": trace.blocks,
            "distinct_blocks": trace.distinct_blocks,
            "block_tokens": trace.block_tokens,
            "tokens": trace.tokens,
            "seconds": seconds,
            "endless_hit_rate": self._endless_hits() / trace.blocks if trace.blocks else 0.0,
        }

    def run(
        self, tiers: Sequence[SimulatedTier], *, on_progress: Callable[[int], None] | None = None
    ) -> Mapping[str, object]:
        """Replay the trace through these tiers and return the figures as plain data."""
        setting = self.setting
        sims = [SimTier(tier.settings, tier.make_policy()) for tier in tiers]
        replay = Replay(
            sims,
            block_bytes=setting.block_bytes,
            full_blocks=setting.full_blocks,
            hints=setting.hints,
            keep_runs=True,
        )
        began = time.perf_counter()
        outcome = replay.run(self.trace, on_progress=on_progress)
        seconds = time.perf_counter() - began
        blocks = sum(tier.settings.capacity for tier in tiers) // setting.block_bytes
        result: dict[str, object] = {
            "policy": "+".join(tier.policy for tier in tiers),
            "capacity_blocks": blocks,
            "capacity_bytes": sum(tier.settings.capacity for tier in tiers),
            "hits": outcome.hits,
            "blocks": outcome.blocks,
            "hit_rate": outcome.hit_rate,
            "accesses_per_second": outcome.blocks / seconds if seconds else 0.0,
        }
        if setting.optimum:
            best = self._optimal_hits(blocks)
            result["optimum_hit_rate"] = best / outcome.blocks if outcome.blocks else 0.0
            result["share_of_optimum"] = outcome.hits / best if best else 1.0
        result["tiers"] = [self._tier(tier, sim, outcome) for tier, sim in zip(tiers, sims, strict=True)]
        result["ttft_seconds"] = self._first_tokens(tiers, outcome)
        return result

    def _tier(self, tier: SimulatedTier, sim: SimTier, outcome: Outcome) -> dict[str, object]:
        seconds = self.trace.requests[-1].seconds - self.trace.requests[0].seconds
        return {
            "name": tier.settings.name,
            "policy": tier.policy,
            "capacity_blocks": tier.settings.capacity // self.setting.block_bytes,
            "hits": sim.hits,
            "hit_rate": sim.hits / outcome.blocks if outcome.blocks else 0.0,
            "read_bytes": sim.read_bytes,
            "written_bytes": sim.written_bytes,
            "written_bytes_per_hit": sim.written_bytes / sim.hits if sim.hits else None,
            "written": sim.written,
            "evicted": sim.evicted,
            "promoted": sim.promoted,
            "demoted": sim.demoted,
            "dropped": sim.dropped,
            "held_back": sim.held_back,
            "written_bytes_per_day": sim.written_bytes * 86_400 / seconds if seconds else None,
            "drive_writes_per_day": sim.written_bytes * 86_400 / seconds / tier.settings.capacity if seconds else None,
        }

    def _first_tokens(self, tiers: Sequence[SimulatedTier], outcome: Outcome) -> dict[str, float]:
        times = first_tokens(
            outcome.run_lengths,
            [request.tokens for request in self.trace.requests],
            [tier.link for tier in tiers],
            block_tokens=self.trace.block_tokens,
            block_bytes=self.setting.block_bytes,
            tokens_per_second=self.setting.tokens_per_second,
        )
        return {name: getattr(times, name) for name in ("mean", "p50", "p90", "p99", "recompute_mean")}

    def _optimal_hits(self, capacity: int) -> int:
        if capacity not in self._optimal:
            self._optimal[capacity] = optimal_hits(self._prefixes, capacity)
        return self._optimal[capacity]

    def _endless_hits(self) -> int:
        if self._endless is None:
            self._endless = endless_hits(self._prefixes)
        return self._endless

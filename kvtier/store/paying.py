"""Whether loading pays: the planner's questions answered from what the tiers' reads took lately."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvtier.concurrency.deadline import Deadline
from kvtier.errors import InvalidValueError
from kvtier.planner import Link, Stretch, plan_load
from kvtier.tier.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier.planner import LoadPlan, Prefill
    from kvtier.store.engine import Engine, Tier
    from kvtier.store.lookup import Located
    from kvtier.store.prefixes import Cached

STALE_SECONDS: Final = 30.0  # an estimate older than this that speaks against a tier is looked at again
PROBED: Final = (1, 3)  # chunks read at once, in turn: two sizes tell latency from bandwidth
MEMORY: Final = Link(latency_seconds=1e-4, bytes_per_second=1e10)  # until a get has told better


class Paying:
    """Plans loads of one store, and keeps the tiers' estimates fresh."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._probing: set[str] = set()

    def seed(self, tier: Tier) -> None:
        """Tell a tier what was measured of it before."""
        link = self._engine.settings.links.get(tier.name)
        if link is not None:
            tier.link.seed(link)

    @contextmanager
    def learning(self, sizes: Mapping[str, int]) -> Iterator[None]:
        """Take note of how long it takes until the bytes in `sizes`, by tier, have come together."""
        began = self._engine.clock.monotonic()
        yield
        self.learn(sizes, self._engine.clock.monotonic() - began)

    def learn(self, sizes: Mapping[str, int], seconds: float) -> None:
        """Take note of a get that got these bytes from these tiers; what came from several tells of none."""
        if len(sizes) != 1:
            return
        ((name, size),) = sizes.items()
        tier = self._engine.tier(name)
        now = self._engine.clock.monotonic()
        if isinstance(tier, MemoryTier):
            tier.link.note(size, seconds, now)
        else:
            tier.link.correct(size, seconds, now)

    def plan(self, cached: Cached, prefill: Prefill | None, *, start: int, split: bool) -> LoadPlan:
        """Return the plan for [start, usable) of a cached prefix.

        What a tier of unknown speed holds is not loaded, nor what comes behind it: the tier is measured in the
        background, for the next time. So is one that was found slow a while ago.

        Raises:
            InvalidValueError: nobody told how long the model computes.
        """
        if prefill is None:
            raise InvalidValueError(
                "how fast the model computes is not known: set store.prefill = kvtier.Prefill.fit([(tokens, seconds), "
                "...]), or [planner] in the config"
            )
        usable = cached.usable()
        sources = self._sources(cached, start, usable)
        stretches = []
        for tokens, size, tier in sources:
            link = self._link(tier)
            if link is None:
                break
            stretches.append(Stretch(tokens=tokens, size=size, link=link, tier=tier.name))
        made = plan_load(stretches, prefill, start=start, split=split)
        self._look_again(cached, [tier for _, _, tier in sources], made, start)
        return made

    def cut(
        self, cached: Cached, deadline: Deadline, *, prefill: Prefill | None, start: int, least_seconds: float
    ) -> Deadline:
        """Shorten a cached prefix to the part that pays, and the deadline to what computing it would take.

        Nothing is left of it where that saves less than `least_seconds`.

        Raises:
            InvalidValueError: `least_seconds` is no number of seconds, or nobody told how long the model computes.
        """
        given: object = least_seconds  # may come straight from a user
        if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given < 0:
            raise InvalidValueError(f"min_benefit_seconds={given!r}: must be a number of seconds, 0 or more")
        made = self.plan(cached, prefill, start=start, split=False)
        if made.choice != "load" or made.benefit_seconds < least_seconds:
            cached.limit = 0
            return deadline
        cached.limit = min(cached.limit, start + made.load_tokens)
        return Deadline(min(deadline.ends, deadline.clock.monotonic() + made.recompute_seconds), deadline.clock)

    def _sources(self, cached: Cached, start: int, usable: int) -> list[tuple[int, int, Tier]]:
        """Return tokens, bytes and source of the chunks of [start, usable), in order."""
        plan = cached.plan
        spans: dict[int, tuple[int, Tier]] = {}
        for piece in plan.needed(start, usable):
            size, tier = self._source(cached.where[piece])
            before = spans.get(piece.span)
            if before is not None:
                size, tier = size + before[0], tier if self._slower(tier, before[1]) else before[1]
            spans[piece.span] = (size, tier)
        return [(min(plan.stop(span), usable) - max(plan.start(span), start), *spans[span]) for span in sorted(spans)]

    def _source(self, where: Located) -> tuple[int, Tier]:
        """Return how many bytes come from which tier, as `Loads` would read them."""
        for tier in self._engine.tiers:
            if where.memory is not None and where.memory[0] is tier:
                return where.memory[1].size, tier
            if where.waiting is tier:  # from memory, whatever tier it is on its way to
                value = self._engine.waiting_in(where.waiting, where.key)
                return 0 if value is None else value.size, tier
            for holder, entry in where.stored:
                if holder is tier:
                    return entry.size, tier
        return 0, self._engine.tiers[-1]

    def _slower(self, one: Tier, other: Tier) -> bool:
        tiers = self._engine.tiers
        return tiers.index(one) > tiers.index(other)

    def _link(self, tier: Tier) -> Link | None:
        """Return what to expect of a tier now: what others read there at this moment comes first."""
        known = tier.link.link
        if isinstance(tier, MemoryTier):
            return known or MEMORY
        if known is None or not tier.in_flight_bytes:
            return known
        queued = tier.in_flight_bytes / known.bytes_per_second
        return Link(latency_seconds=known.latency_seconds + queued, bytes_per_second=known.bytes_per_second)

    def _look_again(self, cached: Cached, tiers: Sequence[Tier], made: LoadPlan, start: int) -> None:
        """Measure a tier that is not going to be loaded from, if what is known of it is nothing, or old."""
        engine, plan = self._engine, cached.plan
        now = engine.clock.monotonic()
        for tier in dict.fromkeys(tiers):
            if isinstance(tier, MemoryTier) or tier.name in self._probing:
                continue
            old = tier.link.sampled is None or now - tier.link.sampled > STALE_SECONDS
            if not old or (made.choice != "recompute" and tier.link.link is not None):
                continue
            keys = [
                plan.key(piece)
                for piece in plan.needed(start, cached.usable())
                if any(holder is tier for holder, _ in cached.where[piece].stored)
            ]
            self._probing.add(tier.name)
            engine.services.supervisor.start(self._probe(cached, tier, keys), name=f"{tier.name} speed")

    async def _probe(self, cached: Cached, tier: Tier, keys: Sequence[str]) -> None:
        engine = self._engine
        holders = {where.key: where.stored for where in cached.where.values()}
        try:
            for number in PROBED:
                chosen, keys = keys[:number], keys[number:]
                flights = [engine.flights.join_or_start(key, holders[key], background=True) for key in chosen]
                for flight in flights:
                    await flight.wait(tier.settings.deadline_seconds)
                    flight.leave()
        finally:
            self._probing.discard(tier.name)

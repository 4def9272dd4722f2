"""How much of a prefix is cached: runs of full chunks, then the windows that end them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.concurrency.deadline import Deadline
from kvtier.store.loads import count_absent
from kvtier.store.lookup import Located, leading_runs, locate, locate_all
from kvtier.store.plan import Piece, PrefixPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.store.engine import Engine


LOOK_AGAIN_SECONDS = 1.0
LEAST_WAIT_SECONDS = 1e-6


@dataclass(slots=True)
class Cached:
    """What is cached of one prefix: where each needed object stands, and what the full groups cover up to the cap."""

    plan: PrefixPlan
    cap: int
    limit: int = 0
    where: dict[Piece, Located] = field(default_factory=dict)
    missing: Piece | None = None  # the first object of the run that nobody has

    def usable(self) -> int:
        """Return the greatest usable length."""
        return self.plan.usable(self.limit, lambda piece: piece in self.where)

    def lose(self, piece: Piece) -> None:
        """Note that an object could not be read after all."""
        self.where.pop(piece, None)
        if any(piece.group == group.name for group in self.plan.full):
            self.limit = min(self.limit, self.plan.start(piece.span))


async def wait_cached(
    engine: Engine, plan: PrefixPlan, cap: int, deadline: Deadline, *, wait_seconds: float = 0.0
) -> Cached:
    """Find out what is cached of one prefix, counting the lookup; wait for puts that would make it longer.

    Puts of this process wake the wait, and those of others where the medium tells; else it looks once a second.
    """
    whole = min(cap, plan.num_tokens // plan.chunk_tokens * plan.chunk_tokens)
    wait = Deadline.after(max(wait_seconds, LEAST_WAIT_SECONDS), engine.clock)
    async with AsyncExitStack() as stack:
        listening = False
        while True:
            heard = engine.arrivals.count
            found = await find_cached(engine, [(plan, cap)], deadline, exact=engine.settings.lossless)
            left = min(wait.remaining(), deadline.remaining())
            if found[0].usable() >= whole or wait_seconds <= 0 or left <= 0:
                count_absent(engine, int(found[0].missing is not None))
                return found[0]
            if not listening:
                listening = True
                if await stack.enter_async_context(engine.hearing.listening(left)):
                    engine.hearing.forget_absent()
                    continue  # what came before somebody listened is found by looking once more
            await engine.arrivals.wait(min(left, LOOK_AGAIN_SECONDS), since=heard)


async def find_cached(
    engine: Engine, asked: Sequence[tuple[PrefixPlan, int]], deadline: Deadline, *, exact: bool = False
) -> list[Cached]:
    """Find out what is cached of each prefix up to its cap (a number of tokens); shared media are asked together.

    The stored tail of a prefix counts if this store knows of it; media are not asked for tails.
    """
    found = [Cached(plan, min(cap, plan.num_tokens)) for plan, cap in asked]
    runs = [_run(cached) for cached in found]
    keys = [[cached.plan.key(piece) for piece in run] for cached, run in zip(found, runs, strict=True)]
    for cached, run, located in zip(found, runs, await leading_runs(engine, keys, deadline, exact=exact), strict=True):
        cached.where.update(zip(run, located, strict=False))
        cached.missing = run[len(located)] if len(located) < len(run) else None
        cached.limit = min(_with_tail(engine, cached, len(located), exact=exact), cached.cap)
    await _find_windows(engine, found, deadline, exact=exact)
    return found


def _run(cached: Cached) -> list[Piece]:
    """Return the full groups' objects below the cap, without the tail."""
    plan = cached.plan
    complete = plan.spans - plan.has_tail
    return plan.run(0, min(cached.cap, complete * plan.chunk_tokens))


def _with_tail(engine: Engine, cached: Cached, found: int, *, exact: bool) -> int:
    """Return what the first `found` objects of the run cover, with the tail behind them if this store has it whole."""
    plan = cached.plan
    limit = plan.limit_of_run(found)
    complete = plan.spans - plan.has_tail
    if not plan.full:
        limit = plan.stop(complete - 1) if complete else 0
    if not plan.has_tail or (plan.full and found < complete * len(plan.full)):
        return limit
    tail = [Piece(group.name, complete) for group in plan.full]
    located = [locate(engine, plan.key(piece), exact=exact) for piece in tail]
    for piece, where in zip(tail, located, strict=True):
        if where is None:
            return limit
        cached.where[piece] = where
    return plan.num_tokens


async def _find_windows(engine: Engine, found: Sequence[Cached], deadline: Deadline, *, exact: bool) -> None:
    wanted = [(cached, piece) for cached in found for piece in cached.plan.window_pieces(cached.limit)]
    if not wanted:
        return
    located = await locate_all(engine, [cached.plan.key(piece) for cached, piece in wanted], deadline, exact=exact)
    for (cached, piece), where in zip(wanted, located, strict=True):
        if where is not None:
            cached.where[piece] = where

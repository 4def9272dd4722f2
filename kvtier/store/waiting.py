"""What `put` checks and waits for when it is asked to."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, CapacityError, InvalidValueError
from kvtier.tier.memory import MemoryTier
from kvtier.tier.writing import STORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine, Tier
    from kvtier.store.placing import Placed

DURABLE = "durable"
SUPERSEDED = "superseded"

_ERRORS: dict[str, type[BackendError]] = {"timeout": BackendTimeoutError, "down": BackendUnavailableError}
_TOLD_BY_TIER = frozenset({"error", "down"})  # what was wrong says the tier
_FULL = frozenset({"capacity", "full", "queue-full", "no-memory", "no-room", "not-admitted"})


def expiry(engine: Engine, ttl_seconds: float | None) -> float | None:
    """Return the wall-clock second at which a value put now expires.

    Raises:
        InvalidValueError: `ttl_seconds` is not a finite number above 0.
    """
    if ttl_seconds is None:
        return None
    given: object = ttl_seconds  # may come straight from a user
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given <= 0:
        raise InvalidValueError(f"ttl_seconds={ttl_seconds!r}: must be a finite number of seconds above 0, or None")
    return engine.clock.wall() + given


def check_wait(engine: Engine, wait: str | None) -> None:
    """Refuse a `wait` that cannot be had, before anything is stored. Raises as `wait_targets`."""
    if wait is not None:
        wait_targets(engine, wait)


async def settle_puts(engine: Engine, placed: Sequence[Placed], wait: str | None, deadline: Deadline) -> None:
    """Wait until every chunk is where `wait` asks for; do nothing for None.

    Raises:
        InvalidValueError: `wait` names no tier, or asks for durability where no tier is persistent.
        CapacityError, BackendUnavailableError, BackendTimeoutError, BackendError: a chunk did not get there.
    """
    if wait is None:
        return
    targets = wait_targets(engine, wait)
    for item in placed:
        if item.reason == SUPERSEDED:  # as good as stored and then replaced or deleted
            continue
        if item.status == "dropped":
            raise _error(item.reason, item.key, wait)
        await _settle(engine, item, targets, wait, deadline)


def wait_targets(engine: Engine, wait: str) -> list[Tier]:
    """Return the tiers of which one must have the value.

    Raises:
        InvalidValueError: there is none.
    """
    if wait == DURABLE:
        targets = [tier for tier in engine.tiers if tier.persistent]
        if not targets:
            raise InvalidValueError("wait='durable': no tier is persistent; add one, such as local-disk")
        return targets
    targets = [tier for tier in engine.tiers if tier.name == wait]
    if not targets:
        known = ", ".join(tier.name for tier in engine.tiers)
        raise InvalidValueError(f"wait={wait!r}: no such tier; use 'durable' or one of {known}")
    return targets


async def _settle(engine: Engine, item: Placed, targets: Sequence[Tier], wait: str, deadline: Deadline) -> None:
    reason, cause = "not offered", ""
    outcomes = {tier.name: outcome for tier, outcome in item.offered}
    for tier in targets:
        if isinstance(tier, MemoryTier):
            if tier.find(item.key) is not None:
                return
            reason = "no-room"
            continue
        outcome = outcomes.get(tier.name) or _offer(engine, tier.name, item.key)
        if outcome is not None:
            done, _ = await asyncio.wait({outcome}, timeout=deadline.remaining())
            reason = outcome.result() if done else "timeout"
            if reason in {STORED, SUPERSEDED}:
                await _older_gone(item, wait, deadline)
                return
        if tier.find(item.key) is not None:
            return
        reason = reason if outcome is not None else ("queue-full" if tier.up else "down")
        cause = tier.breaker.last_error if reason in _TOLD_BY_TIER else ""
    raise _error(reason, item.key, wait, cause=cause)


async def _older_gone(item: Placed, wait: str, deadline: Deadline) -> None:
    """Durable is a value only once the ones it replaced are off every medium: after a crash they would come back."""
    if wait != DURABLE or not item.removals:
        return
    await asyncio.wait(item.removals, timeout=deadline.remaining())
    for removal in item.removals:
        if not removal.done():
            raise _error("timeout", item.key, wait)
        if removal.cancelled() or not removal.result().complete:
            raise _error("the value before it could not be removed", item.key, wait)


def _offer(engine: Engine, tier_name: str, key: str) -> asyncio.Future[str] | None:
    """Send a value that memory has to a tier that did not get it by itself (a write-back tier, say)."""
    writer = engine.writers[tier_name]
    if writer.tier.find(key) is not None:
        return None
    pending = writer.outcome_of(key)
    if pending is not None:
        return pending
    for memory in engine.memory_tiers:
        entry = memory.find(key)
        if entry is not None and entry.value is not None:
            return writer.offer(entry.value, expires=entry.expires, priority=entry.priority)
    return None


def _error(reason: str, key: str, wait: str, *, cause: str = "") -> BackendError:
    kind = CapacityError if reason in _FULL else _ERRORS.get(reason, BackendError)
    return kind(f"wait={wait!r}: chunk {key!r} did not get there: {reason}{f' ({cause})' if cause else ''}")

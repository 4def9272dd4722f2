"""Holds a history against the contract: never lies (K1), and what was promised to last does (K3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.history import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulation.history import Change, History, Promise, Reading

BEFORE = -1.0


def check_history(history: History, *, replacing: bool, calm: bool) -> list[str]:
    """Return what is wrong, in words. `replacing`: a put of a key takes the place of the one before."""
    problems: list[str] = []
    for key in sorted({reading.key for reading in history.readings}):
        changes = history.of(key)
        readings = [reading for reading in history.readings if reading.key == key]
        problems += _untrue(key, changes, readings)
        problems += _outlived(key, changes, readings, replacing=replacing)
        problems += _after_delete(key, changes, readings)
        if replacing:
            for epoch in sorted({reading.epoch for reading in readings}):
                problems += _out_of_order(key, epoch, changes, readings)
            problems += _overwritten_by_lasting(key, changes, readings)
        if calm:
            problems += _lost(key, changes, readings)
    return problems


def _hits(readings: list[Reading]) -> list[Reading]:
    return [reading for reading in readings if reading.value]


def _source(changes: list[Change], reading: Reading) -> Change | None:
    return next((c for c in changes if c.kind == "put" and c.value == reading.value), None)


def _untrue(key: str, changes: list[Change], readings: list[Reading]) -> Iterator[str]:
    """A value that nobody put under this key, or that was put later."""
    for reading in _hits(readings):
        put = _source(changes, reading)
        if put is None or put.start > reading.stop:
            yield f"K1: get of {key} gave value {reading.value}, which nobody had put there"


def _outlived(key: str, changes: list[Change], readings: list[Reading], *, replacing: bool) -> Iterator[str]:
    """A value after its time. Where puts do not replace, a later put or touch lets the first one's value live on."""
    for reading in _hits(readings):
        put = _source(changes, reading)
        if put is None:
            continue
        others = [] if replacing else [c for c in changes if c.kind != "delete" and c.start < reading.stop]
        expires = max(put.expires, *(c.expires for c in others), 0.0)
        if reading.time > expires:
            yield f"TTL: get of {key} at {reading.time:.6f} gave value {reading.value}, expired at {expires:.6f}"


def _binding(change: Change, epoch: int) -> bool:
    """Whether a change counts for what is read in `epoch`."""
    return change.took and (change.epoch == epoch or (change.lasting and change.epoch < epoch))


def _after_delete(key: str, changes: list[Change], readings: list[Reading]) -> Iterator[str]:
    """A value, or the news that there is one, though all that was put was deleted before the call."""
    deletes = [c for c in changes if c.kind == "delete" and c.took]
    puts = [c for c in changes if c.kind == "put"]
    for reading in readings:
        if not reading.there:
            continue
        possible = [p for p in puts if p.start < reading.stop and reading.value in (None, p.value)]
        for put in possible:
            if not any(d.start > put.stop and d.stop < reading.start and _binding(d, reading.epoch) for d in deletes):
                break
        else:
            if possible:
                what = "exists says yes" if reading.value is None else f"get gave value {reading.value}"
                yield f"K1: {what} for {key} (call at {reading.start}) after it was deleted"


def _overwritten_by_lasting(key: str, changes: list[Change], readings: list[Reading]) -> Iterator[str]:
    """A value of an earlier process that another put had replaced for good."""
    for reading in _hits(readings):
        put = _source(changes, reading)
        if put is None or put.epoch == reading.epoch:
            continue
        for later in changes:
            if later.kind == "put" and later.start > put.stop and later.epoch < reading.epoch and later.lasting:
                yield f"K1: get of {key} gave value {reading.value}, replaced by {later.value} in an earlier life"
                break


def _out_of_order(key: str, epoch: int, changes: list[Change], readings: list[Reading]) -> Iterator[str]:
    """Within one life: the values of a key succeed each other as if every call took effect at one moment.

    By zones (Gibbons and Korach 1997): a value's calls span from the first end to the last start. Two values whose
    spans overlap, or a change that lies wholly inside another value's span, have no such order. Misses do not count.
    """
    spans: list[tuple[float, float, str, bool]] = []
    for change in changes:
        reads = [r for r in readings if r.epoch == epoch and change.kind == "put" and r.value == change.value]
        if change.epoch > epoch or (change.epoch < epoch and not reads):
            continue
        if not reads and not change.took:
            continue
        start, stop = (change.start, change.stop) if change.epoch == epoch else (BEFORE, BEFORE)
        first_end = min([stop, *(r.stop for r in reads)])
        last_start = max([start, *(r.start for r in reads)])
        name = f"value {change.value}" if change.kind == "put" else f"delete at {change.start}"
        spans.append((first_end, last_start, name, change.epoch < epoch))
    for i, (end, start, name, old) in enumerate(spans):
        if end >= start:
            continue
        for j, (other_end, other_start, other, other_old) in enumerate(spans):
            if i == j or (old and other_old):
                continue
            overlap = other_end < other_start and max(end, other_end) < min(start, other_start) and i < j
            inside = other_end >= other_start and end < other_start and other_end < start
            if overlap or inside:
                yield f"K1: {key} in life {epoch}: {name} was given after {other} had replaced it (or the other way)"


def _lost(key: str, changes: list[Change], readings: list[Reading]) -> Iterator[str]:
    """In calm weather with room for all: a miss of what was put and not deleted, though at most other puts came."""
    for reading in readings:
        if reading.value or (reading.value is None and reading.there) or not reading.patient:
            continue
        for put in changes:
            if put.kind != "put" or not put.took or _takes_away(put) or put.epoch != reading.epoch:
                continue
            later = [c for c in changes if c.stop > put.start and c.start < reading.stop]
            if put.stop < reading.start and not any(_takes_away(c) for c in later):
                yield f"lost: {key} was put and is a miss (call at {reading.start}), though nothing was full or failed"
                break


def _takes_away(change: Change) -> bool:
    """Whether a miss may follow: a put that another overtook is as good as that other."""
    if change.kind == "delete" or change.expires != NEVER or change.stop == NEVER:
        return True
    return not change.took and change.reason != "superseded"


@dataclass(frozen=True)
class Owed:
    """A value that must be there after a crash."""

    key: str
    value: int
    by: str


def owed(history: History, epoch: int, persistent: set[str]) -> list[Owed]:
    """Return which of the promises made in `epoch` bind its successor: nothing happened to them since."""
    found: dict[str, Owed] = {}
    for promise in history.promises:
        if promise.epoch == epoch and _stands(promise, history, persistent):
            found[promise.key] = Owed(promise.key, promise.value, promise.by)
    return [found[key] for key in sorted(found)]


def _stands(promise: Promise, history: History, persistent: set[str]) -> bool:
    put = next(c for c in history.changes if c.kind == "put" and c.value == promise.value)
    if put.expires != NEVER:
        return False
    if any(c is not put and c.key == promise.key and c.stop > put.start for c in history.changes):
        return False
    for moment, tier, key, how in history.departures:
        counts = key == promise.key and how != "deleted"  # deletes and puts are among the changes
        if counts and moment > put.start and (promise.by == "flush" or tier in persistent):
            return False  # evicted, say, or gone from memory before it could be saved
    if promise.by != "flush":
        return True
    # What was dropped on its way before the flush began may have been nowhere else; later, flush must tell of it.
    return not any(key == promise.key and put.start < moment < promise.start for moment, _tier, key in history.drops)

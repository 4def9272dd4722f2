"""Entries written to a tier, read back and verified, and how long that took beside what such a medium should give."""

from __future__ import annotations

import math
import mmap
import os
import secrets
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.backends.base import Write
from kvtier.chunk.container import payload_offset, payload_size, plan_segments, seal
from kvtier.chunk.header import Header
from kvtier.chunk.segments import SegmentSpec
from kvtier.cli.doctor.finding import Finding
from kvtier.cli.output import human_bytes
from kvtier.cli.stored import check, read_verified
from kvtier.cli.tiers import within
from kvtier.errors import BackendError, CorruptChunkError
from kvtier.keys.names import name_of
from kvtier.sim.timing import LINKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backends.base import Backend, Stat
    from kvtier.concurrency.clock import Clock
    from kvtier.config import TierConfig

ROUNDS = 3
SMALL_BYTES = 4096
LARGE_BYTES = 8 << 20
KEPT_SECONDS = 600.0  # if nobody removes them, for want of a connection, they remove themselves
SLOW_SHARE = 0.1
SKEW_SECONDS = 5.0  # media count changes in seconds, and answers take a while


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Medians: seconds for a small entry, bytes per second for a large one (one at a time)."""

    write_seconds: float
    read_seconds: float
    write_bytes_per_second: float
    read_bytes_per_second: float

    def seconds_to_read(self, size: int) -> float:
        """Return the time that a value of `size` bytes takes."""
        return self.read_seconds + size / self.read_bytes_per_second


async def check_round_trip(
    tier: TierConfig, backend: Backend, *, seconds: float, clock: Clock
) -> tuple[list[Finding], Speeds | None]:
    """Write entries of the doctor's own, read and verify them, remove them again; nothing else is touched."""
    large = min(LARGE_BYTES, max(tier.capacity // 4, SMALL_BYTES))
    trips = _Trips(tier, backend, seconds, clock)
    try:
        small = await trips.times(SMALL_BYTES)
        bulk = await trips.times(large)
    except (BackendError, CorruptChunkError) as exc:
        wrong = isinstance(exc, CorruptChunkError)
        return [
            Finding(
                level="problem",
                check="verification" if wrong else "round-trip",
                tier=tier.name,
                text=f"an entry of the doctor's came back wrong: {exc}" if wrong else f"an entry cannot be kept: {exc}",
                fix="do not use this medium"
                if wrong
                else "see what the message names; the store would drop its writes",
            )
        ], None
    finally:
        await trips.clear()
    speeds = Speeds(
        write_seconds=small[0],
        read_seconds=small[1],
        write_bytes_per_second=large / bulk[0],
        read_bytes_per_second=large / bulk[1],
    )
    return [*_speed(tier, speeds, large), *trips.findings], speeds


class _Trips:
    """The doctor's entries on one medium."""

    def __init__(self, tier: TierConfig, backend: Backend, seconds: float, clock: Clock) -> None:
        self._tier = tier
        self._backend = backend
        self._seconds = seconds
        self._clock = clock
        self._names: list[str] = []
        self.findings: list[Finding] = []

    async def times(self, size: int) -> tuple[float, float]:
        """Return median seconds of a write and of a read with verification."""
        writes, reads = [], []
        for _ in range(ROUNDS):
            name, content = self._made(size)
            self._names.append(name)
            began = time.perf_counter()
            write = self._backend.write_many([Write(name, [content], expires=self._clock.wall() + KEPT_SECONDS)])
            (written,) = await within(write, self._seconds, f"an entry of {len(content)} bytes was not written")
            writes.append(time.perf_counter() - began)
            if isinstance(written, BackendError):
                raise written
            stat = await self._stat(name)
            began = time.perf_counter()
            reading = read_verified(self._backend, stat, max_raw=self._tier.max_value_bytes)
            back = await within(reading, self._seconds, f"an entry of {len(content)} bytes was not read")
            reads.append(time.perf_counter() - began)
            if back.stored != content:
                raise CorruptChunkError("valid bytes, but not those that were written")
            self._look_at_clock(stat)
        return statistics.median(writes), statistics.median(reads)

    async def _stat(self, name: str) -> Stat:
        (stat,) = await within(self._backend.stat_many([name]), self._seconds, "an entry was not found in time")
        if isinstance(stat, BackendError):
            raise stat
        if stat is None:
            raise BackendError(
                "it was gone at once: something removes entries, or the clocks differ by more than its time to live"
            )
        return stat

    def _look_at_clock(self, stat: Stat) -> None:
        """Compare the moment of the write as the medium noted it; 0 says that it notes none."""
        skew = self._clock.wall() - stat.changed if stat.changed else 0.0
        if abs(skew) > SKEW_SECONDS + self._seconds * (skew > 0) and not self.findings:
            self.findings.append(clock_finding(self._tier.name, skew))

    def _made(self, size: int) -> tuple[str, memoryview]:
        key = f"kvtier doctor {secrets.token_hex(8)}"
        specs = [SegmentSpec(name="", dtype="bytes", shape=(size,))]
        segments, offset = plan_segments(specs, [size]), payload_offset(specs, key)
        whole = offset + payload_size(segments)
        view = memoryview(mmap.mmap(-1, whole))
        view[offset : offset + size] = os.urandom(size)
        now = self._clock.wall()
        header = Header(key=key, namespace="", kind="bytes", segments=segments, created=now, expires=now + KEPT_SECONDS)
        seal(view, header, payload_offset=offset, size=whole)
        check(view, name_of(key), max_raw=max(size, 1))
        return name_of(key), view

    async def clear(self) -> None:
        """Remove them all; where that fails they expire."""
        try:
            answers: Sequence[object] = await within(
                self._backend.delete_many(self._names), self._seconds, "entries were not removed"
            )
        except BackendError as exc:
            answers = [exc]
        failed = [answer for answer in answers if isinstance(answer, BackendError)]
        if failed:
            self.findings.append(
                Finding(
                    level="problem",
                    check="delete",
                    tier=self._tier.name,
                    text=f"entries cannot be removed: {failed[0]}",
                    fix="give these credentials the right to delete; without it the tier cannot evict",
                )
            )


def clock_finding(tier: str, skew: float) -> Finding:
    """Return what there is to say about a clock that is `skew` seconds ahead of the medium's."""
    return Finding(
        level="problem",
        check="clock",
        tier=tier,
        text=f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the medium's: entries "
        "would expire at the wrong time",
        fix="set the clocks (NTP, chrony)",
    )


def _speed(tier: TierConfig, speeds: Speeds, large: int) -> list[Finding]:
    said = (
        f"round trip verified; {speeds.read_seconds * 1e3:.2f} ms to read a small entry, "
        f"{human_bytes(speeds.read_bytes_per_second)}/s reading and "
        f"{human_bytes(speeds.write_bytes_per_second)}/s writing {human_bytes(large)}, one at a time"
    )
    link = LINKS.get(str(tier.backend))
    if link is None:
        return [Finding(level="ok", check="round-trip", tier=tier.name, text=said)]
    said += f"; such a tier gives about {human_bytes(link.bytes_per_second)}/s and {link.latency_seconds * 1e3:g} ms"
    slow = speeds.read_bytes_per_second < SLOW_SHARE * link.bytes_per_second and math.isfinite(link.bytes_per_second)
    found = [Finding(level="ok", check="round-trip", tier=tier.name, text=said)]
    if slow and large == LARGE_BYTES:
        found.append(
            Finding(
                level="warning",
                check="slow",
                tier=tier.name,
                text=f"less than {SLOW_SHARE:.0%} of what such a tier should give",
                fix="look at the link and at what else uses it",
            )
        )
    return found

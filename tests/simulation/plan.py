"""One scenario as plain values, all drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

KIB = 1024
VALUE_BYTES = 8 * KIB  # container of the smallest value: a page of header, a page of payload
LARGEST_BYTES = 16 * KIB
FOR_EVER = 1e6
CALM_LATENCIES = 20  # a call that may take so many times the longest delay of a medium has time enough


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    kind: str  # memory, disk, remote
    name: str
    capacity: int
    write: str = "through"
    promote: str = "always"
    policy: str = "lru"
    zstd: bool = False
    on_full: str = "drop"
    ttl_seconds: float | None = None
    required: bool = True
    down_until: float = 0.0  # cannot be opened before
    deadline_seconds: float = 5.0
    queue_bytes: int = 1 << 20
    writers: int = 4
    threads: int = 4
    in_flight_bytes: int = 1 << 20
    negative_seconds: float = 1.0
    threads_io: bool = False
    shared: bool = False
    scan_at_open: bool = False
    native_expiry: bool = False


@dataclass(frozen=True, kw_only=True)
class WeatherPlan:
    """Chances per operation; seconds. Outages are (start, stop, "error" or "hang")."""

    latency: float = 0.02
    errors: float = 0.0
    lost_replies: float = 0.0
    hangs: float = 0.0
    hang_seconds: float = 4.0
    uneven: float = 0.0  # chance that an operation takes up to ten times the latency
    outages: tuple[tuple[float, float, str], ...] = ()

    @property
    def fair(self) -> bool:
        return not (self.errors or self.lost_replies or self.hangs or self.outages)


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One life of the process. `crash_after` seconds it dies, if that is not None; else it closes."""

    clients: int
    calls: int  # per client
    crash_after: float | None = None
    close_amid: float | None = None  # close while clients are at work, after so many seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    face: str  # chunks, kv
    tiers: tuple[TierPlan, ...]
    weather: WeatherPlan
    epochs: tuple[EpochPlan, ...]
    keys: int
    staging_bytes: int
    result_bytes: int
    deadline_seconds: float
    close_seconds: float
    copy_threads: int
    copy_seconds: float
    cancels: float  # chance per call
    ttls: float  # chance per put
    think_seconds: float
    ample: bool  # no tier, queue or budget is ever full
    weights: dict[str, int] = field(default_factory=dict)

    @property
    def calm(self) -> bool:
        """Nothing ever fails or is full: then a value that was put is there."""
        return (
            self.ample
            and self.weather.fair
            and all(not tier.down_until and tier.ttl_seconds is None for tier in self.tiers)
            and all(tier.deadline_seconds >= CALM_LATENCIES * self.weather.latency for tier in self.tiers)
        )


SHAPES = (
    ("memory", "disk"),
    ("memory", "disk"),
    ("memory", "remote"),
    ("memory", "disk", "remote"),
    ("memory", "disk", "remote"),
    ("memory", "memory", "disk"),
    ("memory", "memory", "disk", "remote"),
    ("disk",),
    ("remote",),
    ("disk", "remote"),
    ("disk", "memory", "remote"),
    ("memory",),
)

POLICIES = ("lru", "lru", "lru", "fifo", "lfu", "gdsf", "s3-fifo", "arc")

CALLS = {
    "put": 30,
    "put_durable": 6,
    "put_many": 5,
    "get": 30,
    "get_into": 8,
    "get_many": 8,
    "delete": 9,
    "delete_many": 2,
    "exists": 4,
    "flush": 3,
    "clear": 2,
    "list": 2,
    "stats": 1,
}


def plan_of(seed: int) -> Plan:
    """Return the scenario of `seed`."""
    rng = random.Random(f"plan {seed}")
    ample = rng.random() < 0.3
    weather = _weather(rng)
    shape = rng.choice(SHAPES)
    tiers = tuple(_tier(rng, kind, place, shape, ample=ample) for place, kind in enumerate(shape))
    plan = Plan(
        seed=seed,
        face="kv" if rng.random() < 0.2 else "chunks",
        tiers=tiers,
        weather=weather,
        epochs=_epochs(rng, weather),
        keys=rng.choice((1, 2, 3, 4, 6, 10)),
        staging_bytes=1 << 21 if ample else rng.choice((2, 3, 5, 12, 64)) * LARGEST_BYTES,
        result_bytes=1 << 22 if ample else rng.choice((1 << 18, 1 << 20)),
        deadline_seconds=rng.choice((0.3, 1.0, 2.0, 5.0)),
        close_seconds=rng.choice((1.0, 3.0, 10.0)),
        copy_threads=rng.choice((1, 2, 4)),
        copy_seconds=rng.choice((0.0, 0.0002, 0.003)),
        cancels=rng.choice((0.0, 0.0, 0.05, 0.3)),
        ttls=rng.choice((0.0, 0.0, 0.2)),
        think_seconds=rng.choice((0.0, 0.005, 0.03, 0.3)),
        ample=ample,
        weights=_weights(rng),
    )
    return plan if ample else rng.choice(THEMES)(plan, rng)


def _as_it_is(plan: Plan, rng: random.Random) -> Plan:
    return plan


def _contention(plan: Plan, rng: random.Random) -> Plan:
    """Few keys, many clients, slow and uneven media, memory for a value or two: calls of one key meet all the time."""
    tiers = tuple(
        replace(tier, capacity=rng.choice((1, 2)) * LARGEST_BYTES, promote="always")
        if tier.kind == "memory"
        else replace(tier, deadline_seconds=5.0, down_until=0.0)
        for tier in plan.tiers
    )
    weights = {**plan.weights, "put": 30, "get": 40, "delete": 15}
    return replace(
        plan,
        tiers=tiers,
        keys=rng.choice((1, 2, 3)),
        weather=WeatherPlan(latency=rng.choice((0.01, 0.05)), uneven=0.3),
        epochs=tuple(replace(epoch, clients=5, calls=25) for epoch in plan.epochs),
        deadline_seconds=5.0,
        think_seconds=rng.choice((0.003, 0.03)),
        cancels=0.0,
        weights=weights,
    )


def _cascade(plan: Plan, rng: random.Random) -> Plan:
    """Small tiers that hand down what they evict, and keys enough to make them."""
    shape = rng.choice((("memory", "disk", "remote"), ("disk", "remote"), ("memory", "disk", "disk", "remote")))
    tiers = []
    for place, kind in enumerate(shape):
        drawn = _tier(rng, kind, place, shape, ample=False)
        small = rng.choice((1, 2, 3)) * LARGEST_BYTES if place < len(shape) - 1 else 1 << 20
        write = "back" if place else "through"
        tiers.append(
            replace(drawn, capacity=small, write=write, down_until=0.0, deadline_seconds=5.0, ttl_seconds=None)
        )
    weather = WeatherPlan(latency=rng.choice((0.003, 0.02)), uneven=0.2, errors=rng.choice((0.0, 0.0, 0.03)))
    return replace(
        plan,
        tiers=tuple(tiers),
        keys=rng.choice((2, 4, 6)),
        weather=weather,
        epochs=tuple(replace(epoch, clients=5, calls=25) for epoch in plan.epochs),
        staging_bytes=1 << 20,
        think_seconds=rng.choice((0.005, 0.03)),
        cancels=0.0,
        weights={**plan.weights, "put": 30, "get": 30, "delete": 12, "flush": 1},
    )


def _doubt(plan: Plan, rng: random.Random) -> Plan:
    """Answers get lost, few keys, values that expire: nobody can be sure of what a medium has."""
    weather = replace(
        plan.weather, errors=0.1, lost_replies=0.1, hangs=0.0, latency=rng.choice((0.01, 0.05)), uneven=0.2
    )
    return replace(plan, weather=weather, keys=rng.choice((1, 2, 3)), ttls=0.3, think_seconds=0.03, cancels=0.0)


def _flushing(plan: Plan, rng: random.Random) -> Plan:
    """Flushes and durable puts over media that fail, and a crash soon after: what was promised must hold."""
    tiers = tuple(
        replace(tier, capacity=1 << 20, write=rng.choice(("through", "back")) if place else "through", ttl_seconds=None)
        for place, tier in enumerate(plan.tiers)
    )
    crashes = [EpochPlan(clients=2, calls=15, crash_after=0.05 + rng.random()) for _ in range(3)]
    return replace(
        plan,
        face="chunks",
        tiers=tiers,
        keys=6,
        weather=replace(
            plan.weather, errors=rng.choice((0.0, 0.05, 0.3)), latency=rng.choice((0.003, 0.02)), outages=()
        ),
        epochs=tuple(crashes),
        think_seconds=0.03,
        weights={**dict.fromkeys(CALLS, 1), "put": 30, "put_durable": 10, "flush": 20, "delete": 4},
    )


def _mortality(plan: Plan, rng: random.Random) -> Plan:
    """Most values expire soon, and are put again while they are swept away."""
    return replace(
        plan,
        face=rng.choice(("kv", "kv", "chunks")),
        weather=WeatherPlan(latency=rng.choice((0.05, 0.2)), uneven=0.2),
        tiers=tuple(replace(tier, deadline_seconds=5.0, down_until=0.0) for tier in plan.tiers),
        epochs=tuple(replace(epoch, clients=5, calls=25) for epoch in plan.epochs),
        keys=rng.choice((1, 2, 3)),
        ttls=0.8,
        think_seconds=0.1,
        cancels=0.0,
        weights={**plan.weights, "put": 40, "delete": 3, "clear": 1},
    )


THEMES = (
    *(_mortality, _flushing, _as_it_is, _as_it_is, _as_it_is),
    *(_contention, _contention, _cascade, _cascade, _doubt),
)


def _weights(rng: random.Random) -> dict[str, int]:
    """Make some calls much rarer or much more frequent than usual: each seed its own mix."""
    return {name: max(1, int(weight * rng.choice((0.3, 1, 1, 3)))) for name, weight in CALLS.items()}


def _weather(rng: random.Random) -> WeatherPlan:
    latency = rng.choice((0.001, 0.01, 0.05, 0.3))
    if rng.random() < 0.35:
        return WeatherPlan(latency=latency)
    outages = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        start = rng.random() * 3
        outages.append((start, start + rng.random() * 4, rng.choice(("error", "hang"))))
    return WeatherPlan(
        latency=latency,
        errors=rng.choice((0.0, 0.03, 0.2)),
        lost_replies=rng.choice((0.0, 0.0, 0.03)),
        hangs=rng.choice((0.0, 0.02, 0.1)),
        hang_seconds=rng.choice((1.0, 8.0, 8.0, FOR_EVER)),
        outages=tuple(outages),
    )


def _tier(rng: random.Random, kind: str, place: int, shape: tuple[str, ...], *, ample: bool) -> TierPlan:
    name = f"{kind}{place}"
    capacity = 1 << 22 if ample else rng.choice((2, 3, 4, 6, 10)) * LARGEST_BYTES
    policy = rng.choice(POLICIES)
    promote = rng.choice(("always", "always", "second-touch", "never"))
    write = "back" if place and rng.random() < 0.35 else "through"
    if kind == "memory":
        return TierPlan(kind=kind, name=name, capacity=capacity, policy=policy, promote=promote, write=write,
                        on_full=rng.choice(("drop", "wait")))  # fmt: skip
    remote = kind == "remote"
    required = rng.random() < 0.8
    return TierPlan(
        kind=kind,
        name=name,
        capacity=capacity,
        policy=policy,
        promote=promote,
        write=write,
        zstd=rng.random() < 0.2,
        on_full=rng.choice(("drop", "drop", "wait")),
        ttl_seconds=rng.choice((None, None, None, 1.0)),
        required=required,
        down_until=0.0 if required else rng.choice((0.0, 1.0, 3.0)),
        deadline_seconds=rng.choice((0.3, 1.0, 5.0)),
        queue_bytes=1 << 22 if ample else rng.choice((1, 2, 4, 16)) * LARGEST_BYTES,
        writers=rng.choice((1, 2, 4)),
        threads=rng.choice((1, 2, 4)),
        in_flight_bytes=1 << 22 if ample else rng.choice((1, 2, 4, 16)) * LARGEST_BYTES,
        negative_seconds=rng.choice((0.05, 1.0)),
        threads_io=not remote and rng.random() < 0.5,
        shared=remote,
        scan_at_open=not remote,
        native_expiry=remote and rng.random() < 0.5,
    )


def _epochs(rng: random.Random, weather: WeatherPlan) -> tuple[EpochPlan, ...]:
    epochs = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        end = rng.random()
        epochs.append(
            EpochPlan(
                clients=rng.choice((1, 2, 3, 5)),
                calls=rng.choice((5, 10, 20)),
                crash_after=rng.random() ** 2 * 3 if end < 0.3 else None,
                close_amid=rng.random() ** 2 * 3 if end > 0.8 else None,
            )
        )
    return tuple(epochs)

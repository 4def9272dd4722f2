"""One tier's settings as the engine uses them, detached from how they were configured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

WritePolicy = Literal["through", "back"]
PromotePolicy = Literal["always", "never", "second-touch"]
AdmitPolicy = Literal["always", "second-touch"]
OnFull = Literal["drop", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Sizes in bytes, times in seconds."""

    name: str
    capacity: int
    write: WritePolicy = "through"
    promote: PromotePolicy = "always"
    admit: AdmitPolicy = "always"
    required: bool = True
    on_full: OnFull = "drop"
    ttl_seconds: float | None = None
    deadline_seconds: float = 5.0
    max_in_flight_bytes: int = 512 << 20
    max_in_flight: int = 32
    write_queue_bytes: int = 256 << 20
    writers: int = 4
    threads: int = 4
    negative_seconds: float = 1.0
    pin_fraction: float = 0.5  # of the capacity; more is not pinned
    shares: Mapping[str, float] = field(default_factory=dict)  # of the capacity, by namespace
    warm_bytes: int = 0  # memory tiers: how much to load from below after open
    max_value_bytes: int = 1 << 30  # a stored entry that claims more is not read

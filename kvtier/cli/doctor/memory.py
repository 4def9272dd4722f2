"""Whether this machine has the memory that the config's memory tiers and budgets take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cli.doctor.finding import Finding
from kvtier.cli.output import human_bytes
from kvtier.config.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.config import StoreConfig

LARGE_SHARE = 0.8  # of what is available: the program wants memory, too
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(config: StoreConfig) -> Iterator[Finding]:
    """Hold what the store would take against what there is."""
    arena = sum(tier.capacity for tier in config.tiers if tier.backend == "pinned-cpu")
    wanted = arena + (config.memory.staging_bytes or 0)
    there = available_bytes()
    if there is None or not wanted:
        return
    said = f"memory tiers take {human_bytes(wanted)}, {human_bytes(there)} are available"
    if wanted > LARGE_SHARE * there:
        yield Finding(
            level="problem" if wanted > there else "warning",
            check="memory",
            text=said,
            fix=f"lower the capacity of the memory tier to {format_size(int(there * LARGE_SHARE) >> 20 << 20)} or less",
        )
    else:
        yield Finding(level="ok", check="memory", text=said)


def available_bytes() -> int | None:
    """Return what the machine, and the container this runs in, has left; None where nobody tells."""
    found = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # no such limit, or "max"
            found.append(int(Path(limit).read_text(encoding="ascii")))
    return min(found, default=None)

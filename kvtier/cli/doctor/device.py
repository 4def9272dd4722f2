"""Whether the device that a cuda tier names is there, and has the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.cli.doctor.finding import Finding
from kvtier.cli.output import human_bytes
from kvtier.config.sizes import format_size

if TYPE_CHECKING:
    from kvtier.config import TierConfig


def check_device(tier: TierConfig) -> Finding:
    """Look at the tier's device; nothing is allocated on it."""
    import torch

    device = str(tier.options.get("device") or "cuda")
    if device == "cpu":
        return Finding(
            level="warning",
            check="device",
            tier=tier.name,
            text="device = 'cpu' keeps the tier in host memory, for tests",
            fix="write device = 'cuda', or use pinned-cpu",
        )
    number = int(device.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        return Finding(
            level="problem",
            check="device",
            tier=tier.name,
            text=f"there is no {device} here: PyTorch {torch.__version__} sees {count} CUDA devices",
            fix="install PyTorch with CUDA and the driver, or remove the tier",
        )
    free, _ = torch.cuda.mem_get_info(number)
    said = f"the tier takes {human_bytes(tier.capacity)}, {human_bytes(free)} are free on {device}"
    if tier.capacity <= free:
        return Finding(level="ok", check="device", tier=tier.name, text=said)
    return Finding(
        level="problem",
        check="device",
        tier=tier.name,
        text=said,
        fix=f"lower the capacity to {format_size(free >> 20 << 20)} or less; model and engine want memory, too",
    )

"""Which memory node host memory lies on, where a machine has several: the one beside the GPU that copies from it."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from pathlib import Path

SYSFS = Path("/sys")
# Linux gives each architecture its own numbers of system calls; libnuma, which knows them, is seldom installed.
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: where that node is full, another one rather than none
_WORD_BITS = 64
_log = logging.getLogger("kvtier.buffers")


def nodes(sysfs: Path = SYSFS) -> list[int]:
    """Return the numbers of the machine's memory nodes; [0] where the system does not tell."""
    try:
        text = (sysfs / "devices/system/node/online").read_text().strip()
        ranges = [part.split("-") for part in text.split(",")]
        return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]
    except (OSError, ValueError):
        return [0]


def node_of_pci(address: str, sysfs: Path = SYSFS) -> int | None:
    """Return the node that a PCI device ("0000:17:00.0") is attached to; None where the system does not tell."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_of_gpu(device: int | None) -> int | None:
    """Return the node beside a CUDA device (the current one for None), if torch is loaded and sees one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError):  # a torch that does not tell, or a device that is gone
        return None
    return node_of_pci(address)


def prefer_node(address: int, size: int, node: int) -> bool:
    """Have pages of [address, address + size) that are not backed yet come from `node`; tell whether the kernel agreed.

    Best effort: a failure is logged, and the memory works without it.
    """
    number = _MBIND.get(platform.machine())
    if number is None or sys.platform != "linux":
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_PREFERRED), mask)
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel counts one more than it reads
    if libc.syscall(ctypes.c_long(number), *arguments, bits, ctypes.c_uint(0)) != 0:
        _log.warning("host memory is not placed on node %d: %s", node, os.strerror(ctypes.get_errno()))
        return False
    return True


def place(address: int, size: int, *, wanted: int | None, device: int | None) -> int | None:
    """Prefer one node for memory before it is backed: `wanted`, else the one beside the GPU. Return it, or None.

    Does nothing on a machine with one node.
    """
    there = nodes()
    if len(there) < 2:  # noqa: PLR2004  # nothing to choose
        return None
    node = wanted if wanted is not None else node_of_gpu(device)
    if node is None:
        return None
    if node not in there:
        _log.warning("numa_node=%d: this machine has nodes %s", node, there)
        return None
    return node if prefer_node(address, size, node) else None

"""What bites on a disk tier: permissions, free space, the kind of file system, direct I/O refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cli.doctor.finding import Finding
from kvtier.cli.output import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.config import TierConfig

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
OVER_A_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs"})
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
FLOOR_SHARE = 100


def check_disk(tier: TierConfig, *, held_bytes: int, figures: Mapping[str, int | float | str]) -> Iterator[Finding]:
    """Look at an open disk tier's directory; `held_bytes` is what its entries take now."""
    path = tier.options["path"]
    if not isinstance(path, Path):
        return
    if path.stat().st_mode & _OTHERS:
        yield Finding(
            level="warning",
            check="permissions",
            tier=tier.name,
            text=f"{path} is open to other users of this machine: whoever writes there can spoil entries",
            fix=f"chmod 700 {path}",
        )
    yield from _free_space(tier, path, held_bytes)
    yield from _file_system(tier, path)
    refused = figures.get("io_refused")
    if refused:
        yield Finding(
            level="warning",
            check="direct-io",
            tier=tier.name,
            text=f"{path}: {refused}: every byte goes through the page cache, at the price of a copy and of memory",
            fix='put the tier on ext4 or XFS, or write io = "buffered" to say that this is meant',
        )


def _free_space(tier: TierConfig, path: Path, held_bytes: int) -> Iterator[Finding]:
    volume = os.statvfs(path)
    free, size = volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize
    floor = tier.options.get("min_free")
    keep = floor if isinstance(floor, int) else min(1 << 30, size // FLOOR_SHARE)
    room = max(free - keep, 0)
    if room == 0 or volume.f_favail == 0:
        yield Finding(
            level="problem",
            check="disk-full",
            tier=tier.name,
            text=f"the volume of {path} is full: {human_bytes(free)} of {human_bytes(size)} and {volume.f_favail:,} "
            f"inodes are free, {human_bytes(keep)} are to stay free",
            fix="free space on it, move `path` to another volume, or lower min_free",
        )
    elif held_bytes + room < tier.capacity:
        yield Finding(
            level="warning",
            check="free-space",
            tier=tier.name,
            text=f"the volume of {path} has room for {human_bytes(held_bytes + room)} of entries, the capacity is "
            f"{human_bytes(tier.capacity)}: the volume fills up first",
            fix="lower the capacity, or free space",
        )
    else:
        yield Finding(
            level="ok", check="free-space", tier=tier.name, text=f"{human_bytes(room)} can be written to {path}"
        )


def _file_system(tier: TierConfig, path: Path) -> Iterator[Finding]:
    kind = file_system(path)
    if kind in IN_MEMORY:
        yield Finding(
            level="warning",
            check="file-system",
            tier=tier.name,
            text=f"{path} is {kind}: it is memory, and gone with the next start of the machine",
            fix="move `path` to a drive, or use pinned-cpu for memory",
        )
    elif kind in OVER_A_NETWORK:
        yield Finding(
            level="warning",
            check="file-system",
            tier=tier.name,
            text=f"{path} is {kind}: locks and renames of such file systems are not always what they promise",
            fix="use a local drive; machines share KV through redis or s3",
        )


def file_system(path: Path) -> str:
    """Return the kind of the file system that holds `path`, "" where nobody tells."""
    best, kind = -1, ""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    real = path.resolve()
    for line in mounts:
        _, place, found, *_ = line.split()
        place = place.encode().decode("unicode_escape")
        if real.is_relative_to(place) and len(place) >= best:
            best, kind = len(place), found
    return kind

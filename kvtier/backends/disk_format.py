"""The mark on a disk tier's root that says how it is laid out."""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING

from kvtier.backends.disk_layout import create_file
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.backends.disk_layout import DiskRoot
    from kvtier.backends.disk_owner import Owner

FORMAT = 1
FORMAT_FILE = "kvtier-format"
_MARK = re.compile(rb"kvtier-disk (\d{1,6})\n")


def check_format(root: DiskRoot, owner: Owner) -> None:
    """Mark a root that has no mark yet.

    Raises:
        ConfigError: the mark is of a version this library cannot read, or no mark of ours.
    """
    with root.in_use() as top:
        mark = _read(top)
        if mark:
            match = _MARK.fullmatch(mark)
            if match is None or int(match[1]) != FORMAT:
                raise ConfigError(
                    f"{root.path / FORMAT_FILE} says {mark!r}, this kvtier reads 'kvtier-disk {FORMAT}'; "
                    "use another directory, or upgrade"
                )
            return
        with owner.place() as place:
            unfinished = f"{secrets.token_hex(8)}.tmp"
            fd = create_file(place, unfinished)
            try:
                mark = f"kvtier-disk {FORMAT}\n".encode()
                while mark:
                    mark = mark[os.write(fd, mark) :]
            finally:
                os.close(fd)
            os.rename(unfinished, FORMAT_FILE, src_dir_fd=place, dst_dir_fd=top)


def _read(top: int) -> bytes:
    try:
        fd = os.open(FORMAT_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=top)
    except FileNotFoundError:
        return b""
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)

"""Sizes in human units: "4GiB" is 4 x 1024^3 bytes, "10 GB" is 10 x 1000^3."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

MAX_SIZE: Final = 2**63 - 1
UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
EXAMPLES: Final = 'such as "4GiB", "500 MB" or a whole number of bytes'

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(value: object) -> int:
    """Return the bytes that `value` stands for: an int, or a number with one of `UNITS`, in any case.

    Raises:
        ValueError: it is neither, or not between 1 and 2**63 - 1.
    """
    if isinstance(value, str):
        size = _from_text(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError(f"is not a size; write one {EXAMPLES}")  # noqa: TRY004  # what validators raise
    if size <= 0:
        raise ValueError(f"is not a size of at least 1 byte; write one {EXAMPLES}")
    if size > MAX_SIZE:
        raise ValueError(f"is more than {MAX_SIZE} bytes; write a smaller size")
    return size


def format_size(size: int) -> str:
    """Return the shortest exact text for a number of bytes: "4GiB" for 4294967296, "1000B" for 1000."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % UNITS[unit.upper()] == 0:
            return f"{size // UNITS[unit.upper()]}{unit}"
    return f"{size}B"


def _from_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"is not a size; write one {EXAMPLES}")
    number, unit = match[1], match[2].upper() or "B"
    if unit not in UNITS:
        near = f"{match[1]}{match[2].upper()}iB" if f"{unit}IB" in UNITS else ""
        raise ValueError(f"has no unit that is known here; write {near or 'one ' + EXAMPLES}")
    if unit == "B" and "." in number:
        raise ValueError("is not a whole number of bytes")
    return int(Decimal(number) * UNITS[unit])

"""How many bytes the KV of contexts takes, and how long moving them takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.chunk.dtypes import ITEMSIZE
from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.layout import KVLayout

BITS: Final[dict[str, int]] = {"fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Bits per value of a format, without the scales that a codec keeps beside them."""

LINK_SPEEDS: Final[dict[str, float]] = {  # bytes per second, nominal
    "dram": 20e9,
    "pcie-4-x16": 25e9,
    "pcie-5-x16": 50e9,
    "nvme": 3e9,
    "nvme-gen5": 12e9,
    "10-gbit": 1.25e9,
    "25-gbit": 3.125e9,
    "100-gbit": 12.5e9,
    "400-gbit": 50e9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes of KV: of one more token, of one context, of all sessions."""

    bytes_per_token: float
    bytes_per_session: float
    bytes: float

    def seconds(self, bytes_per_second: float) -> float:
        """Return how long one session's context takes over a link."""
        return self.bytes_per_session / bytes_per_second


def size_of(layout: KVLayout, *, context: int, sessions: int = 1, bits: int | None = None) -> Size:
    """Return the bytes that `sessions` contexts of `context` tokens take, none of it shared.

    A sliding window of W tokens keeps the last W - 1; a token's bytes are those of all layers while no window is full.

    Args:
        layout: of the KV; its dtype counts when `bits` is not given.
        context: tokens of one session.
        sessions: how many of them.
        bits: per value.

    Raises:
        InvalidValueError: a number below 1.
    """
    for name, number in (("context", context), ("sessions", sessions)):
        if number < 1:
            raise InvalidValueError(f"{name} is {number}; write at least 1")
    per_token = per_session = 0.0
    for group in layout.groups:
        token = len(group.layers) * sum(
            (spec.heads or 1) * spec.dim * (ITEMSIZE[spec.dtype] * 8 if bits is None else bits) / 8
            for spec in group.tensors.values()
        )
        per_token += token
        per_session += token * (context if group.window is None else min(context, group.window - 1))
    return Size(bytes_per_token=per_token, bytes_per_session=per_session, bytes=per_session * sessions)


def by_format(layout: KVLayout, *, context: int, sessions: int = 1) -> Mapping[str, Size]:
    """Return the size in each format of `BITS`."""
    return {name: size_of(layout, context=context, sessions=sessions, bits=bits) for name, bits in BITS.items()}

"""Where the parts of a quantised segment lie: from its spec and a scheme alone, the same for writer and reader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from kvtier.chunk.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from kvtier.chunk.segments import SegmentSpec

HEADER = 64  # keeps what follows aligned like the stored segment itself
DTYPES = frozenset({"bfloat16", "float16", "float32"})
SHORTEST = 16  # tokens: below, two limits per channel take more than a quarter of the value's bytes
NARROWEST = 8  # channels of a head, likewise for limits per token

_ROLES = {"k": "channel", "v": "token"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one tensor is quantised.

    `along` is "channel" (limits per channel over a group of tokens) or "token" (per token over a group of one head's
    channels). `bits` are 4 to 8. `group` is the wanted length of a group, 0 for all there is. `symmetric` groups store
    their greatest magnitude, the others minimum and maximum. `floating` codes are e4m3 numbers, not integers.
    """

    along: str
    bits: int
    group: int
    symmetric: bool = False
    floating: bool = False

    @property
    def levels(self) -> int:
        """The greatest code (of a symmetric scheme: the greatest magnitude)."""
        return 448 if self.floating else (1 << self.bits - self.symmetric) - 1

    @property
    def unit(self) -> int:
        """Tokens that share bytes, of a scheme along channels: a group begins with them."""
        return 8 if 4 < self.bits < 8 else 2  # noqa: PLR2004  # planes of single bits; of nibbles, or whole bytes

    @property
    def limits(self) -> int:
        """Numbers stored per group."""
        return 1 if self.symmetric else 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a segment under a scheme: `blocks` matrices of `tokens` x `channels`, heads of `head` channels.

    The first `sinks` tokens are kept as they are, the `rows` others quantised in `groups`, which begin at `starts`
    (rows for a scheme along channels, channels of a head for one along tokens). Without slots, for what is worked out
    but once.
    """

    scheme: Scheme
    itemsize: int
    blocks: int
    tokens: int
    channels: int
    head: int
    sinks: int
    starts: tuple[int, ...]

    @cached_property
    def rows(self) -> int:
        """Quantised tokens per block."""
        return self.tokens - self.sinks

    @cached_property
    def groups(self) -> int:
        """Groups per channel, or per token and block."""
        return len(self.starts) - 1 if self.scheme.along == "channel" else self.channels // self.head * self.head_groups

    @cached_property
    def head_groups(self) -> int:
        """Groups per token and head."""
        return len(self.starts) - 1

    @cached_property
    def even(self) -> bool:
        """Whether all groups of a scheme along tokens have one width."""
        return self.head % self.head_groups == 0

    @cached_property
    def sink_bytes(self) -> int:
        """Bytes of the tokens kept as they are."""
        return self.blocks * self.sinks * self.channels * self.itemsize

    @cached_property
    def limit_shape(self) -> tuple[int, int, int, int]:
        """[blocks, groups, limits, channels] along channels, [blocks, rows, groups, limits] along tokens."""
        if self.scheme.along == "channel":
            return (self.blocks, self.groups, self.scheme.limits, self.channels)
        return (self.blocks, self.rows, self.groups, self.scheme.limits)

    @cached_property
    def plane_rows(self) -> tuple[int, ...]:
        """Rows of `channels` bytes that each plane of a block has.

        Eight bits take one plane. Fewer take a plane of nibbles, two tokens to a byte, and for each bit above four a
        plane of single bits, eight tokens to a byte.
        """
        if self.scheme.bits == 8:  # noqa: PLR2004  # a byte
            return (self.rows,)
        return (
            -(-self.rows // 2),
            *(-(-self.rows // 8) for _ in range(self.scheme.bits - 4)),
        )

    @cached_property
    def planes_at(self) -> tuple[int, ...]:
        """Offsets of the planes."""
        sizes = (self.blocks * rows * self.channels for rows in self.plane_rows[:-1])
        return tuple(accumulate(sizes, initial=self.codes_at))

    @cached_property
    def limits_at(self) -> int:
        """Offset of the limits."""
        return HEADER + self.sink_bytes

    @cached_property
    def codes_at(self) -> int:
        """Offset of the first plane."""
        return self.limits_at + math.prod(self.limit_shape) * self.itemsize

    @cached_property
    def size(self) -> int:
        """Bytes of header, sinks, limits and codes."""
        return self.codes_at + self.blocks * sum(self.plane_rows) * self.channels


@lru_cache(maxsize=1024)  # a store has a few shapes of segments, and asks for each chunk
def plan_for(spec: SegmentSpec, key: Scheme, value: Scheme, sinks: int) -> Plan | None:
    """Return the plan of a segment, or None if it has to be stored exactly.

    Exactly stored are: what is not named "k" or "v", element types other than bfloat16, float16 and float32 (integers
    and engines' own FP8 among them), unknown axes, fewer than 16 tokens or 8 channels per head, and whatever would not
    get smaller.
    """
    along = _ROLES.get(spec.name)
    if along is None or spec.dtype not in DTYPES or spec.axes not in {"LTHD", "LHTD", "LTD"}:
        return None
    scheme = key if along == "channel" else value
    shape = dict(zip(spec.axes, spec.shape, strict=True))
    layers, tokens, heads, head = shape["L"], shape["T"], shape.get("H", 1), shape["D"]
    kept = max(0, min(sinks - spec.first_token, tokens)) if spec.first_token >= 0 else 0
    rows = tokens - kept
    if rows < SHORTEST or head < NARROWEST or not layers * heads:
        return None
    across = spec.axes == "LHTD"
    plan = Plan(
        scheme=scheme,
        itemsize=ITEMSIZE[spec.dtype],
        blocks=layers * heads if across else layers,
        tokens=tokens,
        channels=head if across else heads * head,
        head=head,
        sinks=kept,
        starts=_starts(rows, scheme.group, scheme.unit) if along == "channel" else _starts(head, scheme.group, 1),
    )
    return plan if plan.size < HEADER + math.prod(spec.shape) * plan.itemsize else None


def _starts(length: int, group: int, unit: int) -> tuple[int, ...]:
    """Cut `length` into groups of about `group`, as even as can be, each but the last a multiple of `unit`."""
    count = max(1, round(length / group)) if group else 1
    units = -(-length // unit)
    return tuple(min(unit * (i * units // count), length) for i in range(count + 1))

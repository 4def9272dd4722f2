"""Quantising with torch's own operations, one block at a time: the route that needs nothing else, and the reference."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.codecs.plan import Plan, Scheme

FLOOR = 2.0**-126  # the least step: its reciprocal is finite
ROUND = 1.5 * 2**23  # added to a small number, leaves it rounded to even in the low bits
TOGETHER = 1 << 18  # numbers worked on at a time
MARK = -1  # in place of the limits of a group that is kept exactly: a NaN, which no limit is


@dataclass(frozen=True, slots=True)
class Bits:
    """How a float type's bits are read as an integer; `huge` are those of the least magnitude never quantised.

    The difference of two smaller numbers is finite in float32.
    """

    integer: torch.dtype
    shift: int
    magnitude: int
    huge: int


BITS = {
    torch.bfloat16: Bits(torch.int16, 15, 0x7FFF, 0x7E80),
    torch.float16: Bits(torch.int16, 15, 0x7FFF, 0x7C00),
    torch.float32: Bits(torch.int32, 31, 0x7FFFFFFF, 0x7E800000),
}


@dataclass(slots=True)
class _Part:
    """Some blocks, what is stored of them, and memory to work in: all of it stays in the processor's cache."""

    blocks: torch.Tensor
    limits: torch.Tensor
    planes: tuple[torch.Tensor, ...]
    numbers: torch.Tensor  # float32
    codes: torch.Tensor  # a byte each
    keys: torch.Tensor  # integers that order like the numbers


def encode(blocks: torch.Tensor, plan: Plan, limits: torch.Tensor, planes: Sequence[torch.Tensor]) -> int:
    """Quantise [blocks, rows, channels] into limits and planes; return the number of groups that were marked.

    `limits` holds the bits of the element type as integers, in the shape the plan gives. The codes of marked groups
    are undefined.
    """
    bits = BITS[blocks.dtype]
    marked = 0
    for part in _parts(plan, blocks, limits, planes):
        words = part.blocks.view(bits.integer)
        if plan.scheme.symmetric:
            torch.bitwise_and(words, bits.magnitude, out=part.keys)
        else:
            torch.bitwise_right_shift(words, bits.shift, out=part.keys)
            part.keys.bitwise_and_(bits.magnitude).bitwise_xor_(words)  # now they order like the floats
        part.numbers.copy_(part.blocks)
        for (scaled, ordered, coded), found in _groups(plan, part.limits, part.numbers, part.keys, part.codes):
            marked += _find_limits(plan, ordered, found, bits)
            low, step = _steps(plan.scheme, found, blocks.dtype)
            if low is not None:
                scaled.sub_(low)
            scaled.mul_(step.reciprocal_())
            _round(plan.scheme, scaled, coded)
        if plan.scheme.bits < 8:  # noqa: PLR2004  # a byte
            _pack(part.codes, part.planes)
    return marked


def decode(blocks: torch.Tensor, plan: Plan, limits: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
    """Fill [blocks, rows, channels] from what `encode` wrote; marked groups become NaN."""
    for part in _parts(plan, blocks, limits, planes):
        if plan.scheme.bits < 8:  # noqa: PLR2004  # a byte
            _unpack(part.planes, part.codes)
        coded = _numbers_of(plan.scheme, part.codes)
        part.numbers.copy_(coded)
        for (scaled, codes_of), found in _groups(plan, part.limits, part.numbers, coded):
            low, step = _steps(plan.scheme, found, blocks.dtype)
            scaled.mul_(step)
            if low is not None:
                scaled.add_(low)
            top = step.mul_(plan.scheme.levels) if low is None else step.mul_(plan.scheme.levels).add_(low)
            _restore_tops(plan.scheme, scaled, codes_of, found[-1].view(blocks.dtype), top)
        part.blocks.copy_(part.numbers)


def marked_elements(plan: Plan, limits: torch.Tensor) -> torch.Tensor:
    """Return which elements of [blocks, rows, channels] belong to groups that are kept exactly."""
    mask = torch.zeros((plan.blocks, plan.rows, plan.channels), dtype=torch.bool)
    for (part,), found in _groups(plan, limits, mask):
        part.copy_(found[0] == MARK)
    return mask


def _parts(plan: Plan, blocks: torch.Tensor, limits: torch.Tensor, planes: Sequence[torch.Tensor]) -> Iterator[_Part]:
    """Cut all into parts of few blocks: few calls, and what is worked on stays in the processor's cache."""
    size = plan.rows * plan.channels
    count = max(1, min(plan.blocks, TOGETHER // size))
    numbers, codes, keys = _scratch.buffers(count * size, blocks)
    whole = plan.scheme.bits == 8  # noqa: PLR2004  # a byte: codes are what is stored
    cuts = [torch.split(tensor, count) for tensor in (blocks, limits, *planes)]
    for some, found, *stored in zip(*cuts, strict=True):
        shape = some.shape
        made = [buffer[: shape[0] * size].view(shape) for buffer in (numbers, codes, keys)]
        yield _Part(some, found, tuple(stored), made[0], stored[0] if whole else made[1], made[2])


class _Scratch(threading.local):
    """Memory to work in, of this thread: fresh memory for each value costs a fifth of the time in page faults."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def buffers(self, count: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return room for so many float32, bytes and integers as wide as `like`'s elements."""
        integer = BITS[like.dtype].integer
        mark = (integer, like.device)
        kept = self._kept.get(mark)
        if kept is None or len(kept[0]) < count:
            kept = [
                torch.empty(max(count, TOGETHER), dtype=dtype, device=like.device)
                for dtype in (torch.float32, torch.uint8, integer)
            ]
            if count <= TOGETHER and like.device.type == "cpu":
                self._kept[mark] = kept
        return kept


_scratch = _Scratch()


def _groups(
    plan: Plan, limits: torch.Tensor, *parts: torch.Tensor
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Cut parts of [blocks, rows, channels] into slabs, with limits that broadcast over each: all of them views."""
    starts = plan.starts
    if plan.scheme.along == "channel":
        for group, (first, stop) in enumerate(pairwise(starts)):
            yield [part[:, first:stop] for part in parts], [limit.unsqueeze(1) for limit in limits[:, group].unbind(1)]
        return
    count, heads = plan.head_groups, plan.channels // plan.head
    found = [limit.unsqueeze(-1) for limit in limits.unbind(-1)]
    if plan.even:
        yield [part.view(*part.shape[:2], plan.groups, plan.head // count) for part in parts], found
        return
    for group, (first, stop) in enumerate(pairwise(starts)):
        slabs = [part.view(*part.shape[:2], heads, plan.head)[..., first:stop] for part in parts]
        yield slabs, [limit[:, :, group::count] for limit in found]


def _find_limits(plan: Plan, keys: torch.Tensor, found: Sequence[torch.Tensor], bits: Bits) -> int:
    """Write each group's limits; return how many groups were marked."""
    axis = 1 if plan.scheme.along == "channel" else -1
    most = keys.amax(axis, keepdim=True)
    ends, peak = [most], int(most.amax())
    if not plan.scheme.symmetric:
        least = keys.amin(axis, keepdim=True)
        ends, peak = [least, most], max(peak, -1 - int(least.amin()))
        ends = [end.bitwise_xor_((end >> bits.shift).bitwise_and_(bits.magnitude)) for end in ends]
    marked = 0
    if peak >= bits.huge:
        bad = _is_huge(ends, bits)
        marked = int(bad.sum())
        for end in ends:
            end.masked_fill_(bad, MARK)
    for limit, end in zip(found, ends, strict=True):
        limit.copy_(end)
    return marked


def _is_huge(ends: Sequence[torch.Tensor], bits: Bits) -> torch.Tensor:
    bad = (ends[0] & bits.magnitude) >= bits.huge
    for end in ends[1:]:
        bad |= (end & bits.magnitude) >= bits.huge
    return bad


def _steps(
    scheme: Scheme, found: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return what code 0 stands for (None: zero) and the step between codes, in float32."""
    numbers = [limit.view(dtype).to(torch.float32, copy=True) for limit in found]
    width = 1.0 / scheme.levels
    if scheme.symmetric:
        return None, numbers[0].mul_(width).clamp_min_(FLOOR)
    low, high = numbers
    return low, high.sub_(low).mul_(width).clamp_min_(FLOOR)


def _restore_tops(
    scheme: Scheme, scaled: torch.Tensor, codes: torch.Tensor, high: torch.Tensor, top: torch.Tensor
) -> None:
    """Put each group's greatest number where its code says so, if that is not what code and step came to.

    Else the number would move by a rounding with each round trip, and the whole group with it.
    """
    wrong = top.to(high.dtype) != high
    if not wrong.any():
        return
    wanted = high.to(torch.float32)
    number = codes.to(torch.float32)
    scaled.copy_(torch.where((number == scheme.levels) & wrong, wanted, scaled))
    if scheme.symmetric:
        scaled.copy_(torch.where((number == -scheme.levels) & wrong, -wanted, scaled))


def _round(scheme: Scheme, scaled: torch.Tensor, codes: torch.Tensor) -> None:
    if scheme.floating:
        codes.view(torch.float8_e4m3fn).copy_(scaled)
    else:
        codes.copy_(scaled.add_(ROUND).view(torch.int32))  # the low byte; casting a float takes four times as long


def _numbers_of(scheme: Scheme, codes: torch.Tensor) -> torch.Tensor:
    if scheme.floating:
        return codes.view(torch.float8_e4m3fn)
    return codes.view(torch.int8) if scheme.symmetric else codes


def _pack(codes: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
    """Spread codes of less than eight bits over a plane of nibbles and planes of single bits."""
    nibbles, *singles = planes
    for bit, plane in enumerate(singles, start=4):
        plane.zero_()
        for place in range(8):
            part = codes[:, place::8]
            single = part.bitwise_right_shift(bit).bitwise_and_(1).bitwise_left_shift_(place)
            plane[:, : part.shape[1]].bitwise_or_(single)
    if singles:
        codes.bitwise_and_(15)
    second = codes[:, 1::2]
    nibbles.copy_(codes[:, ::2])
    nibbles[:, : second.shape[1]].bitwise_or_(second * 16)


def _unpack(planes: Sequence[torch.Tensor], codes: torch.Tensor) -> None:
    nibbles, *singles = planes
    second = codes[:, 1::2]
    codes[:, ::2].copy_(nibbles).bitwise_and_(15)
    second.copy_(nibbles[:, : second.shape[1]]).bitwise_right_shift_(4)
    for bit, plane in enumerate(singles, start=4):
        for place in range(8):
            part = codes[:, place::8]
            single = plane[:, : part.shape[1]].bitwise_right_shift(place).bitwise_and_(1).bitwise_left_shift_(bit)
            part.bitwise_or_(single)

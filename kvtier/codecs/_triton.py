"""Triton kernels for bfloat16 on a GPU: quantised before the copy to the host, the same bytes as on the CPU.

`eager` is the reference, also for the order of operations: no fused multiply-add (`enable_fp_fusion=False` at every
launch), a division that rounds correctly, minimum and maximum of integers that order like the floats. Tested through
Triton's interpreter (`TRITON_INTERPRET=1`); what it does on a GPU, and how fast, has not been measured.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
FLOOR = tl.constexpr(2.0**-126)
HUGE = tl.constexpr(0x7E80)


@triton.jit
def _number(bits):
    """Return the float32 of bfloat16 bits held in int32, whatever their upper half."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _order(bits):
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit
def _round(number):
    bits = number.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _limits(bits, inside, axis: tl.constexpr, levels: tl.constexpr, symmetric: tl.constexpr):
    """Return the limits' bits, which groups are too large, code 0's number and the step, all with `axis` kept."""
    if symmetric:
        most = tl.max(tl.where(inside, bits & 0x7FFF, 0), axis, keep_dims=True)
        least = most
        bad = most >= HUGE
        low = _number(most) * 0.0
        step = tl.maximum(_number(most) * (1.0 / levels), FLOOR)
    else:
        keys = _order(bits)
        least = tl.min(tl.where(inside, keys, 0x7FFF), axis, keep_dims=True)
        most = tl.max(tl.where(inside, keys, -0x8000), axis, keep_dims=True)
        bad = (most >= HUGE) | (least < -HUGE)
        least = _order(least)
        most = _order(most)
        low = _number(least)
        step = tl.maximum((_number(most) - low) * (1.0 / levels), FLOOR)
    return least, most, bad, low, step


@triton.jit
def _codes(bits, low, step, mask: tl.constexpr):
    scaled = (_number(bits) - low) * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    return (scaled + ROUND).to(tl.int32, bitcast=True) & mask


@triton.jit
def encode_channels(
    x, limits, codes, singles, starts, block_step, row_step, rows, channels, groups,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One group of one block's tokens, WIDE channels."""
    block, group = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + group)
    stop = tl.load(starts + group + 1)
    r = first + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(2) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (r < stop) & (c < channels)
    bits = tl.load(x + block * block_step + r * row_step + c, mask=inside, other=0).to(tl.int32)
    levels: tl.constexpr = (1 << (BITS - SYMMETRIC)) - 1
    least, most, bad, low, step = _limits(bits, inside, 0, levels, SYMMETRIC)
    at = limits + (block * groups + group) * 2 * channels + c
    tl.store(at, tl.where(bad, -1, least).to(tl.int16), mask=c < channels)
    tl.store(at + channels, tl.where(bad, -1, most).to(tl.int16), mask=c < channels)
    q = tl.where(inside, _codes(bits, low, step, (1 << BITS) - 1), 0)
    if BITS == 8:
        tl.store(codes + (block * rows + r) * channels + c, q.to(tl.uint8), mask=inside)
    else:
        k = tl.arange(0, ROWS)[:, None]
        pairs = tl.sum(tl.reshape((q & 15) << (4 * (k & 1)), (ROWS // 2, 2, WIDE)), 1)
        p = first // 2 + tl.arange(0, ROWS // 2)[:, None]
        tl.store(
            codes + (block * ((rows + 1) // 2) + p) * channels + c,
            pairs.to(tl.uint8),
            mask=(2 * p < stop) & (c < channels),
        )
        if BITS == 5:
            tops = tl.sum(tl.reshape((q >> 4) << (k & 7), (ROWS // 8, 8, WIDE)), 1)
            o = first // 8 + tl.arange(0, ROWS // 8)[:, None]
            tl.store(
                singles + (block * ((rows + 7) // 8) + o) * channels + c,
                tops.to(tl.uint8),
                mask=(8 * o < stop) & (c < channels),
            )


@triton.jit
def decode_channels(
    x, limits, codes, singles, starts, block_step, row_step, rows, channels, groups,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Undo `encode_channels`."""
    block, group = tl.program_id(0), tl.program_id(1)
    r = tl.load(starts + group) + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(2) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (r < tl.load(starts + group + 1)) & (c < channels)
    levels: tl.constexpr = (1 << (BITS - SYMMETRIC)) - 1
    at = limits + (block * groups + group) * 2 * channels + c
    low = _number(tl.load(at, mask=c < channels, other=0).to(tl.int32))
    high = tl.load(at + channels, mask=c < channels, other=0)
    step = tl.maximum((_number(high.to(tl.int32)) - low) * (1.0 / levels), FLOOR)
    if BITS == 8:
        q = tl.load(codes + (block * rows + r) * channels + c, mask=inside, other=0).to(tl.int32)
    else:
        q = tl.load(codes + (block * ((rows + 1) // 2) + r // 2) * channels + c, mask=inside, other=0).to(tl.int32)
        q = (q >> (4 * (r & 1))) & 15
        if BITS == 5:
            top = tl.load(singles + (block * ((rows + 7) // 8) + r // 8) * channels + c, mask=inside, other=0).to(
                tl.int32
            )
            q = q | (((top >> (r & 7)) & 1) << 4)
    words = tl.where(q == levels, high, _round(q.to(tl.float32) * step + low))
    tl.store(x + block * block_step + r * row_step + c, words, mask=inside)


@triton.jit
def encode_tokens(
    x, limits, codes, block_step, row_step, rows, channels, groups, width,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one block, one group of channels."""
    block, group = tl.program_id(0), tl.program_id(2)
    first = tl.program_id(1) * ROWS
    r = first + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDE)[None, :]
    c = group * width + j
    inside = (r < rows) & (j < width)
    bits = tl.load(x + block * block_step + r * row_step + c, mask=inside, other=0).to(tl.int32)
    levels: tl.constexpr = (1 << (BITS - SYMMETRIC)) - 1
    least, most, bad, low, step = _limits(bits, inside, 1, levels, SYMMETRIC)
    at = (block * rows + r) * groups + group
    if SYMMETRIC:
        tl.store(limits + at, tl.where(bad, -1, most).to(tl.int16), mask=r < rows)
    else:
        tl.store(limits + 2 * at, tl.where(bad, -1, least).to(tl.int16), mask=r < rows)
        tl.store(limits + 2 * at + 1, tl.where(bad, -1, most).to(tl.int16), mask=r < rows)
    q = tl.where(inside, _codes(bits, low, step, (1 << BITS) - 1), 0)
    if BITS == 8:
        tl.store(codes + (block * rows + r) * channels + c, q.to(tl.uint8), mask=inside)
    else:
        k = tl.arange(0, ROWS)[:, None]
        pairs = tl.sum(tl.reshape(q << (4 * (k & 1)), (ROWS // 2, 2, WIDE)), 1)
        p = first // 2 + tl.arange(0, ROWS // 2)[:, None]
        tl.store(
            codes + (block * ((rows + 1) // 2) + p) * channels + c,
            pairs.to(tl.uint8),
            mask=(2 * p < rows) & (j < width),
        )


@triton.jit
def decode_tokens(
    x, limits, codes, block_step, row_step, rows, channels, groups, width,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Undo `encode_tokens`."""
    block, group = tl.program_id(0), tl.program_id(2)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDE)[None, :]
    c = group * width + j
    inside = (r < rows) & (j < width)
    levels: tl.constexpr = (1 << (BITS - SYMMETRIC)) - 1
    at = (block * rows + r) * groups + group
    if SYMMETRIC:
        high = tl.load(limits + at, mask=r < rows, other=0)
        step = tl.maximum(_number(high.to(tl.int32)) * (1.0 / levels), FLOOR)
        q = tl.load(codes + (block * rows + r) * channels + c, mask=inside, other=0).to(tl.int8, bitcast=True)
        words = _round(q.to(tl.float32) * step)
    else:
        low = _number(tl.load(limits + 2 * at, mask=r < rows, other=0).to(tl.int32))
        high = tl.load(limits + 2 * at + 1, mask=r < rows, other=0)
        step = tl.maximum((_number(high.to(tl.int32)) - low) * (1.0 / levels), FLOOR)
        pair = tl.load(codes + (block * ((rows + 1) // 2) + r // 2) * channels + c, mask=inside, other=0).to(tl.int32)
        q = (pair >> (4 * (r & 1))) & 15
        words = tl.where(q == levels, high, _round(q.to(tl.float32) * step + low))
    tl.store(x + block * block_step + r * row_step + c, words, mask=inside)

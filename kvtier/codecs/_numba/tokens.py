"""Kernels along tokens: limits per token over a group of channels.

Each is made for vectors of so many `lanes` and for groups of `fixed` channels, or 0 for any width not below `lanes`.
Where a width is no multiple, the last vector begins earlier.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from kvtier.codecs._numba.parts import (
    AHEAD,
    FLOOR,
    HUGE,
    I16,
    MARK,
    U8,
    U16,
    F,
    at,
    inlined,
    made_from,
    value,
    wide,
    word,
)
from kvtier.codecs._numba.vectors import (
    codes,
    evens,
    fetch_octets,
    fetch_words,
    least,
    least_of,
    load_octets,
    load_words,
    lower,
    magnitudes,
    most,
    most_of,
    nibbles,
    octets,
    odds,
    scaled,
    settle,
    signed_codes,
    signed_most,
    signed_most_of,
    signed_scaled,
    spread,
    stream,
    upper,
)


def token8_encoder(lanes, fixed, sources):
    def encode_token8(
        x, outer, outer_step, inner, inner_step, step, rows, groups, width, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        width = fixed or width
        limits = carray(at(limits_at), (outer * inner, rows, groups), np.uint16)
        marked = 0
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            for r in range(rows):
                plane = plane_at + (block * rows + r) * groups * width
                for g in range(groups):
                    group = begin + 2 * (r * step + g * width)
                    found = magnitudes(load_words(group, lanes))
                    for place in range(lanes, width, lanes):
                        found = most(found, magnitudes(load_words(group + 2 * min(place, width - lanes), lanes)))
                    top = most_of(found)
                    bad = top >= U16(HUGE)
                    marked += bad
                    limits[block, r, g] = MARK if bad else top
                    factor = spread(F(1.0) / max(value(top) * (F(1.0) / F(127)), FLOOR), lanes)
                    for place in range(0, width, lanes):
                        c = min(place, width - lanes)
                        words = load_words(group + 2 * c, lanes)
                        fetch_words(group + 2 * c + AHEAD, lanes)
                        even, odd = signed_codes(evens(words), factor), signed_codes(odds(words), factor)
                        stream(plane + g * width + c, octets(even, odd))
        return marked

    return encode_token8


def token8_decoder(lanes, fixed, sources):
    def decode_token8(
        x, outer, outer_step, inner, inner_step, step, rows, groups, width, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        width = fixed or width
        limits = carray(at(limits_at), (outer * inner, rows, groups), np.uint16)
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            for r in range(rows):
                plane = plane_at + (block * rows + r) * groups * width
                for g in range(groups):
                    group = begin + 2 * (r * step + g * width)
                    size = spread(max(value(limits[block, r, g]) * (F(1.0) / F(127)), FLOOR), lanes)
                    for place in range(0, width, lanes):
                        c = min(place, width - lanes)
                        fetch_octets(plane + g * width + c + AHEAD // 2, lanes)
                        stream(group + 2 * c, signed_scaled(load_octets(plane + g * width + c, lanes), size))
        settle()
        return 0

    return decode_token8


@inlined
def _find_limits(group, width, lanes, limits):
    """Write minimum and maximum of one group of one token; return whether it was marked, and how to scale."""
    wide()
    above = below = near = load_words(group, lanes)
    for place in range(lanes, width, lanes):
        bits = load_words(group + 2 * min(place, width - lanes), lanes)
        above, below, near = signed_most(above, bits), most(below, bits), least(near, bits)
    # as in channels._channel_limits
    positive, negative, nearest = signed_most_of(above), most_of(below), least_of(near)
    high = U16(positive) if positive >= I16(0) else nearest
    lowest = negative if negative >= U16(0x8000) else nearest
    bad = ((high & U16(0x7FFF)) >= U16(HUGE)) | ((lowest & U16(0x7FFF)) >= U16(HUGE))
    limits[0] = MARK if bad else lowest
    limits[1] = MARK if bad else high
    low = value(limits[0])
    return bad, low, F(1.0) / max((value(limits[1]) - low) * (F(1.0) / F(15)), FLOOR)


def token4_encoder(lanes, fixed, sources):
    def encode_token4(
        x, outer, outer_step, inner, inner_step, step, rows, groups, width, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        width = fixed or width
        limits = carray(at(limits_at), (outer * inner, rows, groups, 2), np.uint16)
        marked = 0
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            for p in range((rows + 1) // 2):
                r, alone = 2 * p, 2 * p + 1 == rows
                plane = plane_at + (block * ((rows + 1) // 2) + p) * groups * width
                for g in range(groups):
                    group = begin + 2 * (r * step + g * width)
                    other = group if alone else group + 2 * step
                    bad, low, factor = _find_limits(group, width, lanes, limits[block, r, g])
                    marked += bad
                    a, f, b, k = spread(low, lanes), spread(factor, lanes), spread(low, lanes), spread(factor, lanes)
                    if not alone:
                        bad, low, factor = _find_limits(other, width, lanes, limits[block, r + 1, g])
                        marked += bad
                        b, k = spread(low, lanes), spread(factor, lanes)
                    for place in range(0, width, lanes):
                        c = min(place, width - lanes)
                        words = load_words(group + 2 * c, lanes)
                        fetch_words(group + 2 * c + AHEAD, lanes)
                        even, odd = codes(evens(words), a, f), codes(odds(words), a, f)
                        if not alone:
                            words = load_words(other + 2 * c, lanes)
                            fetch_words(other + 2 * c + AHEAD, lanes)
                            even, odd = nibbles(even, codes(evens(words), b, k)), nibbles(odd, codes(odds(words), b, k))
                        stream(plane + g * width + c, octets(even, odd))
        return marked

    return encode_token4


@inlined
def _restore_tops(group, width, plane, half, limits, low, size):
    """As in eager._restore_tops, for one group of one token."""
    if word(F(15) * size + low) != limits[1]:
        stored, u = carray(at(plane), (1, width), np.uint8), carray(at(group), (1, width), np.uint16)
        for j in range(width):
            if (stored[0, j] >> U8(4 * half)) & U8(15) == U8(15):
                u[0, j] = limits[1]


def token4_decoder(lanes, fixed, sources):
    def decode_token4(
        x, outer, outer_step, inner, inner_step, step, rows, groups, width, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        width = fixed or width
        limits = carray(at(limits_at), (outer * inner, rows, groups, 2), np.uint16)
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            for p in range((rows + 1) // 2):
                r, alone = 2 * p, 2 * p + 1 == rows
                plane = plane_at + (block * ((rows + 1) // 2) + p) * groups * width
                for g in range(groups):
                    group, other = begin + 2 * (r * step + g * width), begin + 2 * ((r + 1) * step + g * width)
                    pair = plane + g * width
                    low, high = value(limits[block, r, g, 0]), value(limits[block, r, g, 1])
                    size = max((high - low) * (F(1.0) / F(15)), FLOOR)
                    s, a = spread(size, lanes), spread(low, lanes)
                    for place in range(0, width, lanes):
                        c = min(place, width - lanes)
                        fetch_octets(pair + c + AHEAD // 2, lanes)
                        stream(group + 2 * c, scaled(lower(load_octets(pair + c, lanes)), s, a, s, a))
                    _restore_tops(group, width, pair, 0, limits[block, r, g], low, size)
                    if alone:
                        continue
                    low, high = value(limits[block, r + 1, g, 0]), value(limits[block, r + 1, g, 1])
                    size = max((high - low) * (F(1.0) / F(15)), FLOOR)
                    s, a = spread(size, lanes), spread(low, lanes)
                    for place in range(0, width, lanes):
                        c = min(place, width - lanes)
                        stream(other + 2 * c, scaled(upper(load_octets(pair + c, lanes)), s, a, s, a))
                    _restore_tops(other, width, pair, 1, limits[block, r + 1, g], low, size)
        settle()
        return 0

    return decode_token4

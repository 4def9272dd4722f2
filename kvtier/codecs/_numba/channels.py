"""Kernels along channels: limits per channel over a group of tokens, or all tokens of a block.

Each is made for vectors of so many `lanes`; a block has at least as many channels. Where its channels are no multiple,
the last vector begins earlier and does some of them twice.
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
    load_evens,
    load_half,
    load_octets,
    load_odds,
    load_words,
    lower,
    nibbles,
    octets,
    odds,
    scaled,
    settle,
    store,
    stream,
    upper,
)


@inlined
def scratch(channels, lanes):
    """Return how many float32 there must be for a limit of all channels, with `part`'s behind them.

    In one array: numba frees one that only its address is used of.
    """
    return channels + 2 * (channels + lanes)


@inlined
def part(one, other, channels, lanes, parted):
    """Write two limits of all channels as the kernels' vectors take them: even and odd channels of each apart.

    For every vector of channels there are 8 * lanes bytes: both limits of the even ones, then both of the odd ones.
    """
    for place in range(0, channels, lanes):
        c, to = min(place, channels - lanes), parted + 8 * place
        store(to, load_evens(one + 4 * c, lanes))
        store(to + 2 * lanes, load_evens(other + 4 * c, lanes))
        store(to + 4 * lanes, load_odds(one + 4 * c, lanes))
        store(to + 6 * lanes, load_odds(other + 4 * c, lanes))


@inlined
def parts_of(parted, lanes):
    wide()
    even, odd = parted, parted + 4 * lanes
    return (
        load_half(even, lanes),
        load_half(even + 2 * lanes, lanes),
        load_half(odd, lanes),
        load_half(odd + 2 * lanes, lanes),
    )


@inlined
def codes_of(row, parted, lanes, ahead):
    """Return the codes of some channels of one row, even ones and odd ones; the row `ahead` is fetched."""
    wide()
    low, factor, odd_low, odd_factor = parts_of(parted, lanes)
    words = load_words(row, lanes)
    fetch_words(row + ahead, lanes)
    return codes(evens(words), low, factor), codes(odds(words), odd_low, odd_factor)


@inlined
def _pair(row, step, parted, lanes, ahead):
    """Return the codes of some channels of two rows, each pair in a byte."""
    wide()
    even, odd = codes_of(row, parted, lanes, ahead)
    second_even, second_odd = codes_of(row + 2 * step, parted, lanes, ahead)
    return octets(nibbles(even, second_even), nibbles(odd, second_odd))


@inlined
def numbers_of(found, parted, lanes):
    """Return the bfloat16 of codes of some channels."""
    wide()
    size, low, odd_size, odd_low = parts_of(parted, lanes)
    return scaled(found, size, low, odd_size, odd_low)


@inlined
def _channel_limits(begin, step, rows, channels, levels, limits, low, factor):
    """Find each channel's minimum and maximum over so many rows; return the number of channels marked.

    As signed integers, bits order like the positive floats, as unsigned ones like the negative floats from zero down.
    So one maximum of each kind finds both limits, unless all numbers have one sign: then the unsigned minimum is one.
    """
    wide()
    u = carray(at(begin), (rows, step), np.uint16)
    above, below, near = np.empty(channels, I16), np.empty(channels, U16), np.empty(channels, U16)
    for c in range(channels):
        above[c], below[c], near[c] = I16(u[0, c]), u[0, c], u[0, c]
    whole = 1 + (rows - 1) // 4 * 4
    for r in range(1, whole, 4):  # four rows at a time: fewer loads and stores of what was found so far
        for c in range(channels):
            b1, b2, b3, b4 = u[r, c], u[r + 1, c], u[r + 2, c], u[r + 3, c]
            above[c] = max(above[c], max(max(I16(b1), I16(b2)), max(I16(b3), I16(b4))))
            below[c] = max(below[c], max(max(b1, b2), max(b3, b4)))
            near[c] = min(near[c], min(min(b1, b2), min(b3, b4)))
    for r in range(whole, rows):
        for c in range(channels):
            above[c], below[c], near[c] = max(above[c], I16(u[r, c])), max(below[c], u[r, c]), min(near[c], u[r, c])
    marked = 0
    for c in range(channels):
        high = U16(above[c]) if above[c] >= I16(0) else near[c]
        least = below[c] if below[c] >= U16(0x8000) else near[c]
        bad = ((high & U16(0x7FFF)) >= U16(HUGE)) | ((least & U16(0x7FFF)) >= U16(HUGE))
        marked += bad
        limits[0, c] = MARK if bad else least
        limits[1, c] = MARK if bad else high
        low[c] = value(limits[0, c])
        factor[c] = F(1.0) / max((value(limits[1, c]) - low[c]) * (F(1.0) / F(levels)), FLOOR)
    return marked


@inlined
def _channel_steps(channels, levels, limits, low, size):
    """Work out what codes stand for; return how many channels' top codes do not come to their greatest numbers."""
    wide()
    wrong = 0
    for c in range(channels):
        low[c] = value(limits[0, c])
        size[c] = max((value(limits[1, c]) - low[c]) * (F(1.0) / F(levels)), FLOOR)
        wrong += word(F(levels) * size[c] + low[c]) != limits[1, c]
    return wrong


@inlined
def _is_wrong(c, levels, limits, low, size):
    return word(F(levels) * size[c] + low[c]) != limits[1, c]


def channel8_encoder(lanes, sources):
    def encode_channel8(
        x, outer, outer_step, inner, inner_step, step, rows, channels, starts, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        groups = len(starts) - 1
        limits = carray(at(limits_at), (outer * inner * groups, 2, channels), np.uint16)
        low, factor = np.empty(scratch(channels, lanes), F), np.empty(channels, F)
        lows, factors = low.ctypes.data, factor.ctypes.data
        parted = lows + 4 * channels
        marked = 0
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            for g in range(groups):
                first, stop, found = starts[g], starts[g + 1], limits[block * groups + g]
                start = begin + 2 * first * step
                marked += _channel_limits(start, step, stop - first, channels, 255, found, low, factor)
                after = block + (g + 1) // groups  # the next group is fetched while this one is encoded
                ahead = x + 2 * (after // inner * outer_step + after % inner * inner_step) - start
                ahead += 2 * starts[(g + 1) % groups] * step
                part(lows, factors, channels, lanes, parted)
                for r in range(first, stop):
                    row, plane = begin + 2 * r * step, plane_at + (block * rows + r) * channels
                    for place in range(0, channels, lanes):
                        c = min(place, channels - lanes)
                        even, odd = codes_of(row + 2 * c, parted + 8 * place, lanes, ahead)
                        stream(plane + c, octets(even, odd))
        return marked

    return encode_channel8


def channel8_decoder(lanes, sources):
    def decode_channel8(
        x, outer, outer_step, inner, inner_step, step, rows, channels, starts, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        groups = len(starts) - 1
        limits = carray(at(limits_at), (outer * inner * groups, 2, channels), np.uint16)
        stored = carray(at(plane_at), (outer * inner, rows, channels), np.uint8)
        low, size = np.empty(scratch(channels, lanes), F), np.empty(channels, F)
        lows, sizes = low.ctypes.data, size.ctypes.data
        parted = lows + 4 * channels
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            u = carray(at(begin), (rows, step), np.uint16)
            for g in range(groups):
                found = limits[block * groups + g]
                wrong = _channel_steps(channels, 255, found, low, size)
                part(sizes, lows, channels, lanes, parted)
                for r in range(starts[g], starts[g + 1]):
                    row, plane = begin + 2 * r * step, plane_at + (block * rows + r) * channels
                    for place in range(0, channels, lanes):
                        c = min(place, channels - lanes)
                        fetch_octets(plane + c + AHEAD // 2, lanes)
                        found8 = load_octets(plane + c, lanes)
                        stream(row + 2 * c, numbers_of(found8, parted + 8 * place, lanes))
                for c in range(channels if wrong else 0):
                    if _is_wrong(c, 255, found, low, size):  # as in eager._restore_tops
                        for r in range(starts[g], starts[g + 1]):
                            if stored[block, r, c] == U8(255):
                                u[r, c] = found[1, c]
        settle()
        return 0

    return decode_channel8


def channel4_encoder(lanes, sources):
    def encode_channel4(
        x, outer, outer_step, inner, inner_step, step, rows, channels, starts, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        groups = len(starts) - 1
        limits = carray(at(limits_at), (outer * inner * groups, 2, channels), np.uint16)
        low, factor = np.empty(scratch(channels, lanes), F), np.empty(channels, F)
        lows, factors = low.ctypes.data, factor.ctypes.data
        parted = lows + 4 * channels
        marked = 0
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            plane = plane_at + block * ((rows + 1) // 2) * channels
            for g in range(groups):
                first, stop, found = starts[g], starts[g + 1], limits[block * groups + g]
                start = begin + 2 * first * step
                marked += _channel_limits(start, step, stop - first, channels, 15, found, low, factor)
                after = block + (g + 1) // groups  # the next group is fetched while this one is encoded
                ahead = x + 2 * (after // inner * outer_step + after % inner * inner_step) - start
                ahead += 2 * starts[(g + 1) % groups] * step
                part(lows, factors, channels, lanes, parted)
                for p in range(first // 2, (stop + 1) // 2):
                    row, pair, alone = begin + 4 * p * step, plane + p * channels, 2 * p + 1 == stop
                    for place in range(0, channels, lanes):
                        c = min(place, channels - lanes)
                        if alone:
                            even, odd = codes_of(row + 2 * c, parted + 8 * place, lanes, ahead)
                            store(pair + c, octets(even, odd))
                        else:
                            stream(pair + c, _pair(row + 2 * c, step, parted + 8 * place, lanes, ahead))
        return marked

    return encode_channel4


def channel4_decoder(lanes, sources):
    def decode_channel4(
        x, outer, outer_step, inner, inner_step, step, rows, channels, starts, limits_at, plane_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        groups = len(starts) - 1
        limits = carray(at(limits_at), (outer * inner * groups, 2, channels), np.uint16)
        stored = carray(at(plane_at), (outer * inner, (rows + 1) // 2, channels), np.uint8)
        low, size = np.empty(scratch(channels, lanes), F), np.empty(channels, F)
        lows, sizes = low.ctypes.data, size.ctypes.data
        parted = lows + 4 * channels
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            plane = plane_at + block * ((rows + 1) // 2) * channels
            u = carray(at(begin), (rows, step), np.uint16)
            for g in range(groups):
                first, stop, found = starts[g], starts[g + 1], limits[block * groups + g]
                wrong = _channel_steps(channels, 15, found, low, size)
                part(sizes, lows, channels, lanes, parted)
                for p in range(first // 2, (stop + 1) // 2):
                    row, pair, alone = begin + 4 * p * step, plane + p * channels, 2 * p + 1 == stop
                    for place in range(0, channels, lanes):
                        c, sizes_of = min(place, channels - lanes), parted + 8 * place
                        fetch_octets(pair + c + AHEAD // 2, lanes)
                        both = load_octets(pair + c, lanes)
                        stream(row + 2 * c, numbers_of(lower(both), sizes_of, lanes))
                        if not alone:
                            stream(row + 2 * (step + c), numbers_of(upper(both), sizes_of, lanes))
                for c in range(channels if wrong else 0):
                    if _is_wrong(c, 15, found, low, size):
                        for r in range(first, stop):
                            if (stored[block, r // 2, c] >> U8(4 * (r & 1))) & U8(15) == U8(15):
                                u[r, c] = found[1, c]
        settle()
        return 0

    return decode_channel4

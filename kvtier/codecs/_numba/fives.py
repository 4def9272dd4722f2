"""Kernels for five bits along channels: a plane of nibbles, and one of single bits, eight tokens to a byte."""

from __future__ import annotations

import numpy as np
from numba import carray

from kvtier.codecs._numba.channels import (
    _channel_limits,
    _channel_steps,
    _is_wrong,
    codes_of,
    numbers_of,
    part,
    scratch,
)
from kvtier.codecs._numba.parts import AHEAD, U8, F, at, inlined, made_from, wide
from kvtier.codecs._numba.vectors import (
    either,
    fetch_octets,
    joined,
    load_octets,
    lower,
    octets,
    settle,
    shifted_bit,
    store,
    stream,
    upper,
)


@inlined
def _row(row, parted, lanes, ahead):
    wide()
    even, odd = codes_of(row, parted, lanes, ahead)
    return octets(even, odd)


@inlined
def _pair(row, step, nibble, parted, lanes, ahead, place):
    """Write the nibbles of two rows; return their fifth bits as the bits `place` and the next."""
    wide()
    one, two = _row(row, parted, lanes, ahead), _row(row + 2 * step, parted, lanes, ahead)
    store(nibble, joined(one, two))
    return either(shifted_bit(one, 4, place), shifted_bit(two, 4, place + 1))


@inlined
def _eight(row, step, nibble, channels, parted, lanes, ahead):
    """Write the nibbles of eight rows; return their fifth bits."""
    wide()
    tops = _pair(row, step, nibble, parted, lanes, ahead, 0)  # written out: shifts by numbers known when compiling
    tops = either(tops, _pair(row + 4 * step, step, nibble + channels, parted, lanes, ahead, 2))
    tops = either(tops, _pair(row + 8 * step, step, nibble + 2 * channels, parted, lanes, ahead, 4))
    return either(tops, _pair(row + 12 * step, step, nibble + 3 * channels, parted, lanes, ahead, 6))


@inlined
def _rest(row, step, nibble, channels, rows, parted, lanes, ahead):
    """Write fewer rows than eight; return their fifth bits."""
    wide()
    one = _row(row, parted, lanes, ahead)
    tops = shifted_bit(one, 4, 0)
    if rows == 1:
        store(nibble, lower(one))
        return tops
    for r in range(0, rows - 1, 2):
        pair = _pair(row + 2 * r * step, step, nibble + r // 2 * channels, parted, lanes, ahead, r)
        tops = either(tops, pair)
    if rows & 1:
        one = _row(row + 2 * (rows - 1) * step, parted, lanes, ahead)
        store(nibble + rows // 2 * channels, lower(one))
        tops = either(tops, shifted_bit(one, 4, rows - 1))
    return tops


def channel5_encoder(lanes, sources):
    def encode_channel5(
        x, outer, outer_step, inner, inner_step, step, rows, channels, starts, limits_at, plane_at, bits_at
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
            bits = bits_at + block * ((rows + 7) // 8) * channels
            for g in range(groups):  # all but the last end with eight rows
                first, stop = starts[g], starts[g + 1]
                start = begin + 2 * first * step
                found = limits[block * groups + g]
                marked += _channel_limits(start, step, stop - first, channels, 31, found, low, factor)
                part(lows, factors, channels, lanes, parted)
                after = block + (g + 1) // groups  # the next group is fetched while this one is encoded
                ahead = x + 2 * (after // inner * outer_step + after % inner * inner_step) - start
                ahead += 2 * starts[(g + 1) % groups] * step
                for q in range(first // 8, (stop + 7) // 8):
                    for place in range(0, channels, lanes):
                        c = min(place, channels - lanes)
                        row, nibble = begin + 2 * (8 * q * step + c), plane + 4 * q * channels + c
                        of = parted + 8 * place
                        if 8 * q + 8 <= stop:
                            tops = _eight(row, step, nibble, channels, of, lanes, ahead)
                        else:
                            tops = _rest(row, step, nibble, channels, stop - 8 * q, of, lanes, ahead)
                        store(bits + q * channels + c, tops)
        return marked

    return encode_channel5


@inlined
def _restore_pair(row, step, nibble, tops, parted, lanes, place):
    wide()
    fetch_octets(nibble + AHEAD // 2, lanes)
    both = load_octets(nibble, lanes)
    stream(row, numbers_of(either(lower(both), shifted_bit(tops, place, 4)), parted, lanes))
    stream(row + 2 * step, numbers_of(either(upper(both), shifted_bit(tops, place + 1, 4)), parted, lanes))


@inlined
def _restore_eight(row, step, nibble, channels, tops, parted, lanes):
    wide()
    _restore_pair(row, step, nibble, tops, parted, lanes, 0)
    _restore_pair(row + 4 * step, step, nibble + channels, tops, parted, lanes, 2)
    _restore_pair(row + 8 * step, step, nibble + 2 * channels, tops, parted, lanes, 4)
    _restore_pair(row + 12 * step, step, nibble + 3 * channels, tops, parted, lanes, 6)


@inlined
def _restore_rest(row, step, nibble, channels, rows, tops, parted, lanes):
    wide()
    for r in range(0, rows - 1, 2):
        _restore_pair(row + 2 * r * step, step, nibble + r // 2 * channels, tops, parted, lanes, r)
    if rows & 1:
        both = load_octets(nibble + rows // 2 * channels, lanes)
        code = either(lower(both), shifted_bit(tops, rows - 1, 4))
        stream(row + 2 * (rows - 1) * step, numbers_of(code, parted, lanes))


def channel5_decoder(lanes, sources):
    def decode_channel5(
        x, outer, outer_step, inner, inner_step, step, rows, channels, starts, limits_at, plane_at, bits_at
    ):  # fmt: skip
        wide()
        made_from(sources)
        groups = len(starts) - 1
        limits = carray(at(limits_at), (outer * inner * groups, 2, channels), np.uint16)
        stored = carray(at(plane_at), (outer * inner, (rows + 1) // 2, channels), np.uint8)
        single = carray(at(bits_at), (outer * inner, (rows + 7) // 8, channels), np.uint8)
        low, size = np.empty(scratch(channels, lanes), F), np.empty(channels, F)
        lows, sizes = low.ctypes.data, size.ctypes.data
        parted = lows + 4 * channels
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            plane = plane_at + block * ((rows + 1) // 2) * channels
            bits = bits_at + block * ((rows + 7) // 8) * channels
            u = carray(at(begin), (rows, step), np.uint16)
            for g in range(groups):
                first, stop, found = starts[g], starts[g + 1], limits[block * groups + g]
                wrong = _channel_steps(channels, 31, found, low, size)
                part(sizes, lows, channels, lanes, parted)
                for q in range(first // 8, (stop + 7) // 8):
                    for place in range(0, channels, lanes):
                        c = min(place, channels - lanes)
                        tops, of = load_octets(bits + q * channels + c, lanes), parted + 8 * place
                        row, nibble = begin + 2 * (8 * q * step + c), plane + 4 * q * channels + c
                        if 8 * q + 8 <= stop:
                            _restore_eight(row, step, nibble, channels, tops, of, lanes)
                        else:
                            _restore_rest(row, step, nibble, channels, stop - 8 * q, tops, of, lanes)
                for c in range(channels if wrong else 0):
                    if _is_wrong(c, 31, found, low, size):
                        for r in range(first, stop):
                            nibble = (stored[block, r // 2, c] >> U8(4 * (r & 1))) & U8(15)
                            if (nibble == U8(15)) & ((single[block, r // 8, c] >> U8(r & 7)) & U8(1) == U8(1)):
                                u[r, c] = found[1, c]
        settle()
        return 0

    return decode_channel5

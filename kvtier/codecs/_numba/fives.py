"""Kernels for five bits along channels: a plane of nibbles, and one of single bits, eight tokens to a byte."""

from __future__ import annotations

import numpy as np
from numba import carray

from kvtier.codecs._numba.channels import _channel_limits, _channel_steps, _is_wrong
from kvtier.codecs._numba.parts import U8, F, at, inlined, wide
from kvtier.codecs._numba.vectors import (
    codes,
    either,
    joined,
    load_numbers,
    load_octets,
    load_words,
    lower,
    narrow,
    scaled,
    shifted_bit,
    store,
    upper,
    values,
)


@inlined
def _pair(row, step, nibble, a, f, place):
    """Write the nibbles of two rows; return their fifth bits as the bits `place` and the next."""
    wide()
    one = narrow(codes(values(load_words(row, a)), a, f))
    two = narrow(codes(values(load_words(row + 2 * step, a)), a, f))
    store(nibble, joined(one, two))
    return either(shifted_bit(one, 4, place), shifted_bit(two, 4, place + 1))


@inlined
def _rest(row, step, nibble, channels, rows, a, f):
    """Write fewer rows than eight; return their fifth bits."""
    wide()
    one = narrow(codes(values(load_words(row, a)), a, f))
    tops = shifted_bit(one, 4, 0)
    if rows == 1:
        store(nibble, lower(one))
        return tops
    for k in range(0, rows - 1, 2):
        tops = either(tops, _pair(row + 2 * k * step, step, nibble + k // 2 * channels, a, f, k))
    if rows & 1:
        one = narrow(codes(values(load_words(row + 2 * (rows - 1) * step, a)), a, f))
        store(nibble + rows // 2 * channels, lower(one))
        tops = either(tops, shifted_bit(one, 4, rows - 1))
    return tops


def channel5_encoder(lanes):
    def encode_channel5(
        x, outer, outer_step, inner, inner_step, step, rows, channels, limits_at, plane_at, bits_at
    ):  # fmt: skip
        wide()
        limits = carray(at(limits_at), (outer * inner, 2, channels), np.uint16)
        low, factor = np.empty(channels, F), np.empty(channels, F)
        lows, factors = low.ctypes.data, factor.ctypes.data
        marked = 0
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            plane = plane_at + block * ((rows + 1) // 2) * channels
            bits = bits_at + block * ((rows + 7) // 8) * channels
            marked += _channel_limits(begin, step, rows, channels, 31, limits[block], low, factor)
            for q in range((rows + 7) // 8):
                for place in range(0, channels, lanes):
                    c = min(place, channels - lanes)
                    a, f = load_numbers(lows + 4 * c, lanes), load_numbers(factors + 4 * c, lanes)
                    row, nibble = begin + 2 * (8 * q * step + c), plane + 4 * q * channels + c
                    if 8 * q + 8 <= rows:  # written out: shifts by numbers known when compiling
                        tops = _pair(row, step, nibble, a, f, 0)
                        tops = either(tops, _pair(row + 4 * step, step, nibble + channels, a, f, 2))
                        tops = either(tops, _pair(row + 8 * step, step, nibble + 2 * channels, a, f, 4))
                        tops = either(tops, _pair(row + 12 * step, step, nibble + 3 * channels, a, f, 6))
                    else:
                        tops = _rest(row, step, nibble, channels, rows - 8 * q, a, f)
                    store(bits + q * channels + c, tops)
        return marked

    return encode_channel5


@inlined
def _restore_pair(row, step, nibble, tops, s, a, place):
    wide()
    both = load_octets(nibble, a)
    store(row, scaled(either(lower(both), shifted_bit(tops, place, 4)), s, a))
    store(row + 2 * step, scaled(either(upper(both), shifted_bit(tops, place + 1, 4)), s, a))


@inlined
def _restore_rest(row, step, nibble, channels, rows, tops, s, a):
    wide()
    for k in range(0, rows - 1, 2):
        _restore_pair(row + 2 * k * step, step, nibble + k // 2 * channels, tops, s, a, k)
    if rows & 1:
        both = load_octets(nibble + rows // 2 * channels, a)
        store(row + 2 * (rows - 1) * step, scaled(either(lower(both), shifted_bit(tops, rows - 1, 4)), s, a))


def channel5_decoder(lanes):
    def decode_channel5(
        x, outer, outer_step, inner, inner_step, step, rows, channels, limits_at, plane_at, bits_at
    ):  # fmt: skip
        wide()
        limits = carray(at(limits_at), (outer * inner, 2, channels), np.uint16)
        stored = carray(at(plane_at), (outer * inner, (rows + 1) // 2, channels), np.uint8)
        single = carray(at(bits_at), (outer * inner, (rows + 7) // 8, channels), np.uint8)
        low, size = np.empty(channels, F), np.empty(channels, F)
        lows, sizes = low.ctypes.data, size.ctypes.data
        for block in range(outer * inner):
            begin = x + 2 * (block // inner * outer_step + block % inner * inner_step)
            plane = plane_at + block * ((rows + 1) // 2) * channels
            bits = bits_at + block * ((rows + 7) // 8) * channels
            u = carray(at(begin), (rows, step), np.uint16)
            wrong = _channel_steps(channels, 31, limits[block], low, size)
            for q in range((rows + 7) // 8):
                for place in range(0, channels, lanes):
                    c = min(place, channels - lanes)
                    s, a = load_numbers(sizes + 4 * c, lanes), load_numbers(lows + 4 * c, lanes)
                    tops = load_octets(bits + q * channels + c, lanes)
                    row, nibble = begin + 2 * (8 * q * step + c), plane + 4 * q * channels + c
                    if 8 * q + 8 <= rows:
                        _restore_pair(row, step, nibble, tops, s, a, 0)
                        _restore_pair(row + 4 * step, step, nibble + channels, tops, s, a, 2)
                        _restore_pair(row + 8 * step, step, nibble + 2 * channels, tops, s, a, 4)
                        _restore_pair(row + 12 * step, step, nibble + 3 * channels, tops, s, a, 6)
                    else:
                        _restore_rest(row, step, nibble, channels, rows - 8 * q, tops, s, a)
            for c in range(channels if wrong else 0):
                if _is_wrong(c, 31, limits[block], low, size):
                    for r in range(rows):
                        nibble = (stored[block, r // 2, c] >> U8(4 * (r & 1))) & U8(15)
                        if (nibble == U8(15)) & ((single[block, r // 8, c] >> U8(r & 7)) & U8(1) == U8(1)):
                            u[r, c] = limits[block, 1, c]
        return 0

    return decode_channel5

"""What the numba kernels are made of: bits of floats, addresses, rounding, and wider vectors.

What they rely on, each by measurement: two-dimensional indices (a flat one keeps numba's test for negative numbers and
is not vectorised), minimum and maximum of 16-bit integers that order like the floats, rounding to even by adding
1.5 * 2**23, no `parallel=True` (unsafe for several callers at once), no `fastmath` (a contracted multiply-add rounds
otherwise than torch's two operations, and both routes must write the same bytes).
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F, U, U16, U8, I16, I32 = np.float32, np.uint32, np.uint16, np.uint8, np.int16, np.int32
ROUND = F(12582912.0)
FLOOR = F(2.0**-126)  # the least step: its reciprocal is finite
HUGE = I16(0x7E80)  # bits of 2**126
MARK = U16(0xFFFF)
AHEAD = 4096  # bytes of numbers that are fetched ahead: the processor itself stops at the end of a page


@intrinsic
def _float(context, bits):
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def _bits(context, number):
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def at(context, address):
    return types.voidptr(types.intp), lambda c, b, s, a: b.inttoptr(a[0], ir.IntType(8).as_pointer())


@intrinsic
def wide(context):
    def code(c, b, s, a):
        set.add(b.function.attributes, '"prefer-vector-width"="512"')
        return c.get_dummy_value()

    return types.void(), code


@intrinsic
def made_from(context, sources):
    """Do nothing: `sources`, a constant of the kernel, is what it is for. See `kvtier.codecs._numba`."""
    return types.void(sources), lambda c, b, s, a: c.get_dummy_value()


inlined = numba.njit(nogil=True, error_model="numpy", boundscheck=False)


@inlined
def value(word):
    return _float(U(word) << U(16))


@inlined
def word(number):
    bits = _bits(number)
    return U16((bits + U(0x7FFF) + ((bits >> U(16)) & U(1))) >> U(16))


@inlined
def order(word):
    """Return the integer that orders like the float; applied twice, it is the word again."""
    key = I16(word)
    return I16(key ^ ((key >> I16(15)) & I16(0x7FFF)))


@inlined
def code(number):
    return _bits(number + ROUND)

"""Vectors for the numba kernels: LLVM's own, so that what a loop becomes does not depend on how it is recognised.

Numba leaves loops to LLVM's vectoriser, which widens 16-bit numbers eight at a time and shuffles more than it computes
when it narrows them again. Written as operations on vectors of a fixed number of lanes, the same loop takes the
processor's pack instructions. LLVM splits the lanes over as many registers as they need. Addresses need no alignment.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import register_default
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic

_ELEMENTS = {"i8": ir.IntType(8), "i16": ir.IntType(16), "i32": ir.IntType(32), "f32": ir.FloatType()}
_ROUND = 12582912.0  # as parts.ROUND


class Vector(types.Type):
    """So many lanes of one element type."""

    def __init__(self, element, lanes):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({lanes} x {element})")


@register_default(Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.VectorType(_ELEMENTS[kind.element], kind.lanes))


class _Lanes:
    """LLVM's types and constants for vectors of so many lanes, and a few steps that several operations take."""

    def __init__(self, builder, lanes):
        self.b, self.lanes = builder, lanes
        self.i8, self.i16, self.i32, self.f32 = (ir.VectorType(element, lanes) for element in _ELEMENTS.values())

    def same(self, number, kind):
        return ir.Constant(kind, [number] * self.lanes)

    def spread(self, number, kind):
        index, undefined = ir.IntType(32), ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(undefined, number, ir.Constant(index, 0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(index, self.lanes), [0] * self.lanes))

    def load(self, place, kind):
        return self.b.load(self.b.inttoptr(place, kind.as_pointer()), align=1)

    def store(self, place, found):
        self.b.store(found, self.b.inttoptr(place, found.type.as_pointer()), align=1)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def narrow(self, codes):
        """Keep the low byte of each lane."""
        return self.b.trunc(self.b.and_(codes, self.same(255, self.i32)), self.i8)

    def code(self, numbers):
        """Round to even; the result is in the low bits."""
        return self.b.bitcast(self.b.fadd(numbers, self.same(_ROUND, self.f32)), self.i32)

    def rounded(self, numbers):
        """Return the nearest bfloat16, ties to even."""
        b, bits = self.b, self.b.bitcast(numbers, self.i32)
        odd = b.and_(b.lshr(bits, self.same(16, self.i32)), self.same(1, self.i32))
        return b.trunc(b.lshr(b.add(b.add(bits, self.same(0x7FFF, self.i32)), odd), self.same(16, self.i32)), self.i16)

    def reduced(self, words, way):
        kind = ir.FunctionType(_ELEMENTS["i16"], [self.i16])
        name = f"llvm.vector.reduce.{way}.v{self.lanes}i16"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), [words])


def _operation(result, make):
    """Return what an intrinsic returns for arguments of which one is a vector."""

    def typed(*given):
        lanes = next(kind.lanes for kind in given if isinstance(kind, Vector))
        returned = Vector(result, lanes) if isinstance(result, str) else result
        return returned(*given), lambda _c, builder, _s, arguments: make(_Lanes(builder, lanes), *arguments)

    return typed


def _loading(element, make):
    """Return what an intrinsic returns for an argument and a number of lanes, or any vector that has as many."""

    def typed(given, lanes):
        count = lanes.lanes if isinstance(lanes, Vector) else lanes.literal_value
        return Vector(element, count)(given, lanes), lambda _c, builder, _s, arguments: make(
            _Lanes(builder, count), arguments[0]
        )

    return typed


@intrinsic(prefer_literal=True)
def load_words(_context, address, lanes):
    return _loading("i16", lambda v, place: v.load(place, v.i16))(address, lanes)


@intrinsic(prefer_literal=True)
def load_octets(_context, address, lanes):
    return _loading("i8", lambda v, place: v.load(place, v.i8))(address, lanes)


@intrinsic(prefer_literal=True)
def load_numbers(_context, address, lanes):
    return _loading("f32", lambda v, place: v.load(place, v.f32))(address, lanes)


@intrinsic(prefer_literal=True)
def spread(_context, number, lanes):
    """All lanes the same float32."""
    return _loading("f32", lambda v, found: v.spread(found, v.f32))(number, lanes)


@intrinsic
def store(_context, address, vector):
    return _operation(types.void, _Lanes.store)(address, vector)


@intrinsic
def values(_context, words):
    """The float32 of bfloat16 bits."""

    def make(v, bits):
        return v.b.bitcast(v.b.shl(v.b.zext(bits, v.i32), v.same(16, v.i32)), v.f32)

    return _operation("f32", make)(words)


@intrinsic
def magnitudes(_context, words):
    return _operation("i16", lambda v, bits: v.b.and_(bits, v.same(0x7FFF, v.i16)))(words)


@intrinsic
def signed_most(_context, one, other):
    return _operation("i16", lambda v, a, b: v.b.select(v.b.icmp_signed(">", a, b), a, b))(one, other)


@intrinsic
def most(_context, one, other):
    return _operation("i16", lambda v, a, b: v.b.select(v.b.icmp_unsigned(">", a, b), a, b))(one, other)


@intrinsic
def least(_context, one, other):
    return _operation("i16", lambda v, a, b: v.b.select(v.b.icmp_unsigned("<", a, b), a, b))(one, other)


@intrinsic
def signed_most_of(_context, words):
    return _operation(types.int16, lambda v, bits: v.reduced(bits, "smax"))(words)


@intrinsic
def most_of(_context, words):
    return _operation(types.uint16, lambda v, bits: v.reduced(bits, "umax"))(words)


@intrinsic
def least_of(_context, words):
    return _operation(types.uint16, lambda v, bits: v.reduced(bits, "umin"))(words)


@intrinsic
def codes(_context, numbers, low, factor):
    def make(v, x, bottom, scale):
        return v.code(v.b.fmul(v.b.fsub(x, bottom), scale))

    return _operation("i32", make)(numbers, low, factor)


@intrinsic
def signed_codes(_context, numbers, factor):
    return _operation("i32", lambda v, x, scale: v.code(v.b.fmul(x, scale)))(numbers, factor)


@intrinsic
def narrow(_context, found):
    """The low byte of each code."""
    return _operation("i8", _Lanes.narrow)(found)


@intrinsic
def nibbles(_context, one, two):
    """Codes of four bits, `one` in the lower half of each byte."""

    def make(v, a, b):
        return v.narrow(v.b.or_(a, v.b.shl(b, v.same(4, v.i32))))

    return _operation("i8", make)(one, two)


@intrinsic
def joined(_context, one, two):
    """The lower halves of two vectors of bytes, `one`'s below."""

    def make(v, a, b):
        return v.b.or_(v.b.and_(a, v.same(15, v.i8)), v.b.shl(b, v.same(4, v.i8)))

    return _operation("i8", make)(one, two)


@intrinsic
def lower(_context, octets):
    return _operation("i8", lambda v, octet: v.b.and_(octet, v.same(15, v.i8)))(octets)


@intrinsic
def upper(_context, octets):
    return _operation("i8", lambda v, octet: v.b.lshr(octet, v.same(4, v.i8)))(octets)


@intrinsic
def either(_context, one, two):
    return _operation("i8", lambda v, a, b: v.b.or_(a, b))(one, two)


@intrinsic
def shifted_bit(_context, octets, source, target):
    """Bit `source` of each byte, alone, as bit `target`."""

    def make(v, octet, away, to):
        places = [v.spread(v.b.trunc(place, _ELEMENTS["i8"]), v.i8) for place in (away, to)]
        return v.b.shl(v.b.and_(v.b.lshr(octet, places[0]), v.same(1, v.i8)), places[1])

    return _operation("i8", make)(octets, source, target)


@intrinsic
def scaled(_context, octets, size, low):
    """Codes to bfloat16: code * size + low, in two roundings to float32 and one to bfloat16."""

    def make(v, octet, step, bottom):
        numbers = v.b.sitofp(v.b.zext(octet, v.i32), v.f32)
        return v.rounded(v.b.fadd(v.b.fmul(numbers, step), bottom))

    return _operation("i16", make)(octets, size, low)


@intrinsic
def signed_scaled(_context, octets, size):
    def make(v, octet, step):
        return v.rounded(v.b.fmul(v.b.sitofp(v.b.sext(octet, v.i32), v.f32), step))

    return _operation("i16", make)(octets, size)

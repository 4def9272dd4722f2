"""Vectors for the numba kernels: LLVM's own, so that what a loop becomes does not depend on how it is recognised.

A vector of bfloat16 bits is taken apart without moving any across lanes: as half as many 32-bit numbers, its odd
elements are their upper halves (the float32 but for the bits below) and its even ones their lower halves (shifted up).
Codes and results are put together likewise. Widening, narrowing and permuting go through one port of most processors,
which was the limit before; see decision 36. LLVM splits vectors over as many registers as they need. Addresses need no
alignment.
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
_LINE = 64  # bytes: what memory moves at a time


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

    def picked(self, one, other, places):
        return self.b.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))

    def load(self, place, kind):
        return self.b.load(self.b.inttoptr(place, kind.as_pointer()), align=1)

    def store(self, place, found):
        self.b.store(found, self.b.inttoptr(place, found.type.as_pointer()), align=1)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def stream(self, place, found):
        """Store past the caches where that can be done: memory need not be read before it is written."""
        b, size = self.b, found.type.count * found.type.element.width // 8
        if size % _LINE:
            return self.store(place, found)
        aligned = b.icmp_unsigned("==", b.and_(place, ir.Constant(place.type, _LINE - 1)), ir.Constant(place.type, 0))
        with b.if_else(aligned, likely=True) as (past, through):
            with past:
                stored = b.store(found, b.inttoptr(place, found.type.as_pointer()), align=_LINE)
                stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            with through:
                self.store(place, found)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def evens(self, found):
        return self.picked(found, ir.Constant(found.type, ir.Undefined), list(range(0, found.type.count, 2)))

    def odds(self, found):
        return self.picked(found, ir.Constant(found.type, ir.Undefined), list(range(1, found.type.count, 2)))

    def code(self, numbers):
        """Round to even; the result is in the low bits."""
        return self.b.bitcast(self.b.fadd(numbers, self.same(_ROUND, self.f32)), self.i32)

    def mixed(self, even, odd):
        """Return the lower words of `even` and the upper ones of `odd`, each where it is."""
        words = ir.VectorType(ir.IntType(16), 2 * self.lanes)
        places = [lane + 2 * self.lanes * (lane % 2) for lane in range(2 * self.lanes)]
        return self.picked(self.b.bitcast(even, words), self.b.bitcast(odd, words), places)

    def rounded(self, even, odd):
        """Return the nearest bfloat16, ties to even: the upper word, and one more where the lower one is past half."""
        b, sixteen = self.b, self.same(16, self.i32)
        high, low = self.mixed(b.lshr(even, sixteen), odd), self.mixed(even, b.shl(odd, sixteen))
        both = _Lanes(b, 2 * self.lanes)
        last = b.and_(high, both.same(1, both.i16))
        past = b.icmp_unsigned(">", b.or_(low, last), both.same(0x8000, both.i16))
        return b.add(high, b.zext(past, both.i16))

    def reduced(self, words, way):
        kind = ir.FunctionType(_ELEMENTS["i16"], [self.i16])
        name = f"llvm.vector.reduce.{way}.v{self.lanes}i16"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), [words])


def _operation(result, make, *, twice=False, half=False):
    """Return what an intrinsic returns for arguments of which one is a vector, whose lanes `make` works on.

    The result has as many lanes, `twice` as many or `half` of them.
    """

    def typed(*given):
        lanes = next(kind.lanes for kind in given if isinstance(kind, Vector))
        count = 2 * lanes if twice else lanes // 2 if half else lanes
        returned = Vector(result, count) if isinstance(result, str) else result
        worked = count if half else lanes
        return returned(*given), lambda _c, builder, _s, arguments: make(_Lanes(builder, worked), *arguments)

    return typed


def _loading(element, make, *, half=False):
    """Return what an intrinsic returns for an argument and a number of lanes, or half of it."""

    def typed(given, lanes):
        count = lanes.literal_value
        return Vector(element, count // 2 if half else count)(given, lanes), lambda _c, builder, _s, arguments: make(
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
def load_evens(_context, address, lanes):
    """Every other one of so many float32, from the first."""
    return _loading("f32", lambda v, place: v.evens(v.load(place, v.f32)), half=True)(address, lanes)


@intrinsic(prefer_literal=True)
def load_odds(_context, address, lanes):
    return _loading("f32", lambda v, place: v.odds(v.load(place, v.f32)), half=True)(address, lanes)


@intrinsic(prefer_literal=True)
def load_half(_context, address, lanes):
    """Half as many float32 as there are lanes."""

    def make(v, place):
        half = _Lanes(v.b, v.lanes // 2)
        return half.load(place, half.f32)

    return _loading("f32", make, half=True)(address, lanes)


@intrinsic(prefer_literal=True)
def spread(_context, number, lanes):
    """All of half as many lanes the same float32: for even elements as for odd ones."""

    def make(v, found):
        half = _Lanes(v.b, v.lanes // 2)
        return half.spread(found, half.f32)

    return _loading("f32", make, half=True)(number, lanes)


@intrinsic
def store(_context, address, vector):
    return _operation(types.void, _Lanes.store)(address, vector)


@intrinsic
def stream(_context, address, vector):
    """Store past the caches; `settle` before others are told."""
    return _operation(types.void, _Lanes.stream)(address, vector)


@intrinsic
def settle(_context):
    """Wait until what was streamed can be seen by all."""

    def code(c, b, s, a):
        b.fence("seq_cst")
        return c.get_dummy_value()

    return types.void(), code


def _fetching(width):
    """Return what an intrinsic returns that has so many lanes of `width` bytes brought near."""

    def typed(address, lanes):
        size = lanes.literal_value * width

        def code(c, b, s, a):
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            call = b.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            for line in range(0, size, _LINE):
                place = b.inttoptr(b.add(a[0], ir.Constant(a[0].type, line)), pointer)
                b.call(call, [place, *(ir.Constant(number, value) for value in (0, 2, 1))])
            return c.get_dummy_value()

        return types.void(address, lanes), code

    return typed


@intrinsic(prefer_literal=True)
def fetch_words(_context, address, lanes):
    """Have memory that will be read brought near; any address will do, also one of nothing."""
    return _fetching(2)(address, lanes)


@intrinsic(prefer_literal=True)
def fetch_octets(_context, address, lanes):
    return _fetching(1)(address, lanes)


@intrinsic
def evens(_context, words):
    """The float32 of every other bfloat16, from the first."""

    def make(v, bits):
        return v.b.bitcast(v.b.shl(v.b.bitcast(bits, v.i32), v.same(16, v.i32)), v.f32)

    return _operation("f32", make, half=True)(words)


@intrinsic
def odds(_context, words):
    def make(v, bits):
        return v.b.bitcast(v.b.and_(v.b.bitcast(bits, v.i32), v.same(0xFFFF0000, v.i32)), v.f32)

    return _operation("f32", make, half=True)(words)


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
def octets(_context, even, odd):
    """The low bytes of the codes of even and odd elements, in order."""

    def make(v, a, b):
        bytes_of = ir.VectorType(_ELEMENTS["i8"], 4 * v.lanes)
        places = [lane // 2 * 4 + lane % 2 * 4 * v.lanes for lane in range(2 * v.lanes)]
        return v.picked(v.b.bitcast(a, bytes_of), v.b.bitcast(b, bytes_of), places)

    return _operation("i8", make, twice=True)(even, odd)


@intrinsic
def nibbles(_context, one, two):
    """Codes of four bits, `one` in the lower half of each byte."""
    return _operation("i32", lambda v, a, b: v.b.or_(a, v.b.shl(b, v.same(4, v.i32))))(one, two)


@intrinsic
def joined(_context, one, two):
    """The lower halves of two vectors of bytes, `one`'s below."""

    def make(v, a, b):
        return v.b.or_(v.b.and_(a, v.same(15, v.i8)), v.b.shl(b, v.same(4, v.i8)))

    return _operation("i8", make)(one, two)


@intrinsic
def lower(_context, codes_of):
    return _operation("i8", lambda v, octet: v.b.and_(octet, v.same(15, v.i8)))(codes_of)


@intrinsic
def upper(_context, codes_of):
    return _operation("i8", lambda v, octet: v.b.lshr(octet, v.same(4, v.i8)))(codes_of)


@intrinsic
def either(_context, one, two):
    return _operation("i8", lambda v, a, b: v.b.or_(a, b))(one, two)


@intrinsic
def shifted_bit(_context, codes_of, source, target):
    """Bit `source` of each byte, alone, as bit `target`."""

    def make(v, octet, away, to):
        places = [v.spread(v.b.trunc(place, _ELEMENTS["i8"]), v.i8) for place in (away, to)]
        return v.b.shl(v.b.and_(v.b.lshr(octet, places[0]), v.same(1, v.i8)), places[1])

    return _operation("i8", make)(codes_of, source, target)


@intrinsic
def scaled(_context, codes_of, even_size, even_low, odd_size, odd_low):
    """Codes to bfloat16: code * size + low, in two roundings to float32 and one to bfloat16."""

    def make(v, octet, *limits):
        half = _Lanes(v.b, v.lanes // 2)
        pairs = v.b.zext(v.b.bitcast(octet, half.i16), half.i32)
        parts = v.b.and_(pairs, half.same(0xFF, half.i32)), v.b.lshr(pairs, half.same(8, half.i32))
        found = []
        for part, size, low in zip(parts, limits[::2], limits[1::2], strict=True):
            number = v.b.fadd(v.b.fmul(v.b.sitofp(part, half.f32), size), low)
            found.append(v.b.bitcast(number, half.i32))
        return half.rounded(*found)

    return _operation("i16", make)(codes_of, even_size, even_low, odd_size, odd_low)


@intrinsic
def signed_scaled(_context, codes_of, size):
    def make(v, octet, step):
        half = _Lanes(v.b, v.lanes // 2)
        pairs = v.b.sext(v.b.bitcast(octet, half.i16), half.i32)
        away = half.same(24, half.i32)
        parts = v.b.ashr(v.b.shl(pairs, away), away), v.b.ashr(pairs, half.same(8, half.i32))
        return half.rounded(*(v.b.bitcast(v.b.fmul(v.b.sitofp(part, half.f32), step), half.i32) for part in parts))

    return _operation("i16", make)(codes_of, size)

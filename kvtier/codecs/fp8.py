"""Eight-bit floats with scales."""

from __future__ import annotations

from typing import ClassVar

from kvtier.codecs.plan import Scheme
from kvtier.codecs.quantised import QuantisedCodec


class Fp8Codec(QuantisedCodec):
    """Numbers in e4m3, scaled so that 448 is the greatest magnitude of the group.

    Keys per channel over the chunk's tokens, values per token and group. Three bits of mantissa are less than `int8`
    has where it counts: for those who compare, or whose engine computes in this form.
    """

    name = "fp8"
    keys: ClassVar[Scheme] = Scheme(along="channel", bits=8, group=0, symmetric=True, floating=True)
    values: ClassVar[Scheme] = Scheme(along="token", bits=8, group=64, symmetric=True, floating=True)

"""Four bits per number, and five for keys where that is worth it."""

from __future__ import annotations

from typing import ClassVar

from kvtier.codecs.plan import Scheme
from kvtier.codecs.quantised import QuantisedCodec


class Int4Codec(QuantisedCodec):
    """Keys per channel over groups of tokens, values per token over groups of channels, between minimum and maximum."""

    name = "int4"
    keys: ClassVar[Scheme] = Scheme(along="channel", bits=4, group=64)
    values: ClassVar[Scheme] = Scheme(along="token", bits=4, group=64)


class K5V4Codec(QuantisedCodec):
    """Keys with five bits per channel over groups of tokens twice as long as `int4`'s, values as `int4` has them."""

    name = "k5v4"
    form: ClassVar[int] = 2  # in form 1, one group held all of a chunk's tokens
    keys: ClassVar[Scheme] = Scheme(along="channel", bits=5, group=128)
    values: ClassVar[Scheme] = Scheme(along="token", bits=4, group=64)

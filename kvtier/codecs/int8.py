"""Eight bits per number: close enough to bfloat16's own rounding for any use."""

from __future__ import annotations

from typing import ClassVar

from kvtier.codecs.plan import Scheme
from kvtier.codecs.quantised import QuantisedCodec


class Int8Codec(QuantisedCodec):
    """Keys per channel over the chunk's tokens, between minimum and maximum; values per token and group, symmetric."""

    name = "int8"
    keys: ClassVar[Scheme] = Scheme(along="channel", bits=8, group=0)
    values: ClassVar[Scheme] = Scheme(along="token", bits=8, group=64, symmetric=True)

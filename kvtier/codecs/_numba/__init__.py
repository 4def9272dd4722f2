"""Numba kernels for bfloat16: all blocks of a segment in one call, straight between two addresses, without the GIL.

Every kernel takes the address of the first quantised token, `outer` x `inner` blocks with their steps, and the step
between tokens, all in elements; then the plan's sizes; then the addresses of limits and planes. Encoders return the
number of groups that they marked because a number in them is too large to be quantised.

A kernel is a closure over plain numbers only. Numba's cache on disk goes by what a closure holds, and a function in
there is another one in every process: the kernel would be compiled in each of them, and kept once more. It does not go
by what a kernel calls in other files, and lies beside them, where an installer leaves it: without `SOURCES` in each
closure, a new version could run kernels of the one before.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
import numpy as np
from numba import carray, types

from kvtier.codecs._numba import channels, fives, tokens
from kvtier.codecs._numba.parts import U8, U16, at, made_from, wide


def digest_of(folder):
    """Return a number that changes with any source file in there."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return int.from_bytes(digest.digest()[:6], "little")


SOURCES = digest_of(Path(__file__).parent)


def splitter(sources):
    def split(x, count, exponents_at, rest_at):
        wide()
        made_from(sources)
        u = carray(at(x), (count,), np.uint16)
        exponents = carray(at(exponents_at), (count,), np.uint8)
        rest = carray(at(rest_at), (count,), np.uint8)
        for j in range(count):
            exponents[j] = U8(u[j] >> U16(7))
            rest[j] = U8(((u[j] >> U16(8)) & U16(0x80)) | (u[j] & U16(0x7F)))
        return 0

    return split


def joiner(sources):
    def join(x, count, exponents_at, rest_at):
        wide()
        made_from(sources)
        u = carray(at(x), (count,), np.uint16)
        exponents = carray(at(exponents_at), (count,), np.uint8)
        rest = carray(at(rest_at), (count,), np.uint8)
        for j in range(count):
            sign = (U16(rest[j]) & U16(0x80)) << U16(8)
            u[j] = U16(sign | (U16(exponents[j]) << U16(7)) | (U16(rest[j]) & U16(0x7F)))
        return 0

    return join


_SPLIT = {"encode split": splitter, "decode split": joiner}
_CHANNELS = {
    "encode channel8": channels.channel8_encoder,
    "decode channel8": channels.channel8_decoder,
    "encode channel5": fives.channel5_encoder,
    "decode channel5": fives.channel5_decoder,
    "encode channel4": channels.channel4_encoder,
    "decode channel4": channels.channel4_decoder,
}
_TOKENS = {
    "encode token8": tokens.token8_encoder,
    "decode token8": tokens.token8_decoder,
    "encode token4": tokens.token4_encoder,
    "decode token4": tokens.token4_decoder,
}


def compiled(verb, scheme, lanes, fixed):
    """Compile one kernel, or take it from numba's cache on disk."""
    starts = types.Array(types.int64, 1, "C")
    parameters = {
        "split": [types.intp] * 4,
        "channel8": [types.intp] * 8 + [starts, types.intp, types.intp],
        "channel4": [types.intp] * 8 + [starts, types.intp, types.intp],
        "channel5": [types.intp] * 8 + [starts, types.intp, types.intp, types.intp],
        "token8": [types.intp] * 11,
        "token4": [types.intp] * 11,
    }[scheme]
    name = f"{verb} {scheme}"
    if name in _CHANNELS:
        kernel = _CHANNELS[name](lanes, SOURCES)
    else:
        kernel = _TOKENS[name](lanes, fixed, SOURCES) if name in _TOKENS else _SPLIT[name](SOURCES)
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(types.intp(*parameters), cache=True, **options)(kernel)
    except RuntimeError:  # no folder that could be written to
        return numba.njit(types.intp(*parameters), **options)(kernel)

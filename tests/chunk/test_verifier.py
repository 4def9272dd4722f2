"""Piece by piece a container is found right or wrong exactly as it is in one go."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chunk.container import verify
from kvtier.chunk.verifier import Verifier
from kvtier.errors import CorruptChunkError
from kvtier.testing.containers import SAMPLES

CODECS = {"int8", "zstd"}
MAX_RAW = 1 << 20


def in_pieces(view, key, cuts, *, size=None):
    verifier = Verifier(view, key_of=lambda header: key, codecs=CODECS, max_raw=MAX_RAW)
    verifier.advance(0)
    for cut in cuts:
        if not verifier.advance(cut):
            break
    return verifier.finish(len(view) if size is None else size)


def in_one(view, key):
    return verify(view, key=key, codecs=CODECS, max_raw=MAX_RAW)


@pytest.mark.parametrize("make", SAMPLES)
@given(cuts=st.lists(st.integers(1, 60_000), max_size=12))
def test_whole_containers_pass(make, cuts):
    sample = SAMPLES[make]()
    ends = sorted({min(cut, len(sample.view)) for cut in cuts})
    assert in_pieces(sample.view, sample.header.key, ends) == sample.header


@pytest.mark.parametrize("make", SAMPLES)
def test_every_flip_is_found_in_pieces(make):
    """In every byte of the front, and in many of the rest: payload, padding."""
    sample = SAMPLES[make]()
    rng = random.Random(make)
    size = len(sample.view)
    places = [*range(min(size, 4096)), *(rng.randrange(size) for _ in range(500))]
    for place in places:
        spoilt = bytearray(sample.view)
        spoilt[place] ^= 1 << rng.randrange(8)
        for cuts in (range(4096, size, 4096), [size]):
            with pytest.raises(CorruptChunkError):
                in_pieces(memoryview(spoilt), sample.header.key, cuts)


@pytest.mark.parametrize("make", SAMPLES)
def test_short_and_long_containers_are_refused(make):
    sample = SAMPLES[make]()
    size = len(sample.view)
    for other in (0, 1, 47, 4095, size - 4096, size - 1):
        with pytest.raises(CorruptChunkError):
            in_pieces(sample.view, sample.header.key, [], size=other)
    longer = memoryview(bytearray(bytes(sample.view) + bytes(4096)))
    with pytest.raises(CorruptChunkError):
        in_pieces(longer, sample.header.key, [4096, len(longer)])


def test_wrong_key_codec_and_size_are_refused_as_in_one_go():
    sample = SAMPLES["kv"]()
    with pytest.raises(CorruptChunkError, match="not 'other'"):
        in_pieces(sample.view, "other", [])
    verifier = Verifier(sample.view, key_of=lambda header: header.key, codecs=CODECS, max_raw=0)
    assert not verifier.advance(len(sample.view))
    with pytest.raises(CorruptChunkError, match="at most 0"):
        verifier.finish(len(sample.view))


def test_zero_begins_anew():
    """A reader that found the wrong file looks for the right one; nothing of the first attempt counts."""
    sample = SAMPLES["kv"]()
    size = len(sample.view)
    memory = bytearray(size)
    verifier = Verifier(memoryview(memory), key_of=lambda header: sample.header.key, codecs=CODECS, max_raw=MAX_RAW)
    memory[:] = bytes(size)
    assert not verifier.advance(size)
    assert not verifier.advance(size), "wrong bytes stay wrong"
    assert verifier.advance(0)
    memory[:] = sample.view
    assert verifier.advance(5000)
    assert verifier.finish(size) == in_one(sample.view, sample.header.key) == sample.header

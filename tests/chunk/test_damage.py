"""Damaged containers: every bit counts, and no input whatever raises anything but CodecError."""

import os
import random
import struct
import tracemalloc

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.chunk.blob import rebuild
from kvtier.chunk.container import check_segment, peek, segment_view, verify
from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs.chain import CodecChain, Scratch, chain_from_refs
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import CodecError, CorruptChunkError, UnknownPluginError
from kvtier.testing.broken_codecs import SoundCodec
from kvtier.testing.containers import SAMPLES, kv_specs, seal_parts

CLASSES = {"zstd": ZstdCodec, "sound": SoundCodec}
MAX_RAW = 1 << 20
PREAMBLE = struct.Struct("<8sHHIQQ")
FUZZ_INPUTS = int(os.environ.get("KVTIER_FUZZ_INPUTS", "20000"))  # a million takes about two minutes


def flipped_bits_that_pass(sealed, bits):
    """Return the bits whose flipping `verify` does not notice; the container is left as it was."""
    data = bytearray(sealed.view)
    view = memoryview(data)
    passed = []
    for bit in bits:
        data[bit >> 3] ^= 1 << (bit & 7)
        try:
            verify(view, key=sealed.header.key, codecs={"int8", "zstd"}, max_raw=MAX_RAW)
            passed.append(bit)
        except CorruptChunkError:
            pass
        data[bit >> 3] ^= 1 << (bit & 7)
    assert data == sealed.view
    return passed


@pytest.mark.parametrize("name", ["empty", "bytes", "kv", "mapping"])
def test_every_single_bit(name):
    sealed = SAMPLES[name]()
    assert flipped_bits_that_pass(sealed, range(8 * len(sealed.view))) == []


def test_every_bit_that_is_not_padding_and_a_tenth_of_the_rest():
    """With codecs; its padding is like that of the others, all of which is tried above."""
    sealed = SAMPLES["coded"]()
    bits = [8 * i + bit for i, byte in enumerate(sealed.view) if byte for bit in range(8)]
    bits += range(3, 8 * len(sealed.view), 11)
    assert flipped_bits_that_pass(sealed, bits) == []


def test_bits_of_a_large_one():
    chance = random.Random(3)
    spec = SegmentSpec(name="k", dtype="uint8", shape=(1 << 20,))
    sealed = seal_parts([spec], [chance.randbytes(1 << 20)])
    edges = [0, 1, 8 * 4096, 8 * len(sealed.view) - 1]
    assert flipped_bits_that_pass(sealed, edges + [chance.randrange(8 * len(sealed.view)) for _ in range(2000)]) == []


# Whole way through: verify, decode, rebuild


def coded(kind, specs, raws, chain):
    stored = []
    for spec, raw in zip(specs, raws, strict=True):
        into = bytearray(chain.bound(len(raw), spec))
        stored.append(bytes(into[: chain.encode(memoryview(raw), memoryview(into), spec, Scratch())]))
    return seal_parts(specs, stored, kind=kind, chain=chain.refs)


def seeds():
    """Containers whose chains can be decoded here."""
    chance = random.Random(4)
    byte_spec = SegmentSpec(name="", dtype="bytes", shape=(3000,))
    raws = [bytes(chance.choices(b"kvtier", k=240)) for _ in range(2)]
    yield coded("kv", kv_specs(), raws, CodecChain([ZstdCodec()]))
    yield coded("kv", kv_specs(), raws, CodecChain())
    yield coded("kv", kv_specs(), raws, CodecChain([SoundCodec(level=3), ZstdCodec(level=2)]))
    yield coded("bytes", [byte_spec], [b"abc" * 1000], CodecChain([ZstdCodec()]))
    yield SAMPLES["mapping"]()


SEEDS = list(seeds())


def read(view, key):
    """Do what a tier does with bytes from a medium; return the raw bytes of the parts."""
    header = verify(view, key=key, codecs=CLASSES, max_raw=MAX_RAW)
    try:
        chain = chain_from_refs(header.chain, CLASSES.__getitem__)
    except UnknownPluginError:
        raise AssertionError("verify let an unknown codec pass") from None
    raws = []
    for segment in header.segments:
        raw = memoryview(bytearray(segment.raw))
        chain.decode(segment_view(view, header, segment), raw, segment.spec, Scratch())
        raws.append(raw)
    rebuild(header, raws)
    return [bytes(raw) for raw in raws]


@pytest.mark.parametrize("sealed", SEEDS)
def test_seeds_are_read(sealed):
    assert read(memoryview(sealed.bytes), sealed.header.key)


def repair(data):
    """Make the checksums right again, so that what lies behind them is reached."""
    if len(data) < 40:
        return
    offset = PREAMBLE.unpack_from(data)[4]
    try:
        header = peek_unchecked(data)
    except CodecError:
        header = None
    if header is not None:  # put the segments' new checksums where the old ones stand
        for segment in header.segments:
            stored = segment_view(memoryview(data), header, segment)
            old, new = (struct.pack(">Q", n) for n in (segment.checksum, xxhash.xxh3_64_intdigest(stored)))
            data[: header.payload_offset] = data[: header.payload_offset].replace(old, new)
    state = xxhash.xxh3_64(data[:32])
    state.update(data[40 : min(offset, 1 << 20)])
    data[32:40] = struct.pack("<Q", state.intdigest())


def peek_unchecked(data):
    copy = bytearray(data)
    offset = PREAMBLE.unpack_from(copy)[4]
    state = xxhash.xxh3_64(copy[:32])
    state.update(copy[40 : min(offset, 1 << 20)])
    copy[32:40] = struct.pack("<Q", state.intdigest())
    return peek(memoryview(copy))


def mutate(data, chance):
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place = int(len(data) * chance.random() ** 3)  # most often near the front, where the structure is
        match chance.randrange(7):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                data[place : place + 1] = bytes([chance.choice((0, 1, 0x7F, 0x80, 0xC0, 0xDF, 0xFF))])
            case 2:
                data[place : place + 8] = struct.pack("<Q", chance.choice((0, 1, 4096, 1 << 31, 1 << 62, 2**64 - 1)))
            case 3:
                del data[place : place + chance.choice((1, 8, 4096))]
            case 4:
                data[place:place] = chance.randbytes(chance.choice((1, 8, 4096)))
            case 5:
                other = int(len(data) * chance.random() ** 3)
                data[place : place + 16] = data[other : other + 16]
            case _:
                del data[chance.randrange(len(data) + 1) :]


def assert_safe(sealed, data, *, repaired):
    original = sealed.bytes
    if repaired:
        repair(data)
    try:
        raws = read(memoryview(data), sealed.header.key)
    except CodecError:
        return
    assert repaired or data == original, "a changed container passed"
    assert all(len(raw) == segment.raw for raw, segment in zip(raws, sealed.header.segments, strict=False))


def test_random_mutants():
    chance = random.Random(5)
    for number in range(FUZZ_INPUTS):
        sealed = SEEDS[number % len(SEEDS)]
        data = bytearray(sealed.view)
        mutate(data, chance)
        assert_safe(sealed, data, repaired=number % 4 != 0)


def test_random_mutants_reach_the_decoders():
    """Else the test above proves little: some repaired mutants pass `verify`, and some of those fail in a codec."""
    chance = random.Random(6)
    verified = failed = 0
    for number in range(3000):
        sealed = SEEDS[number % len(SEEDS)]
        data = bytearray(sealed.view)
        place = sealed.header.payload_offset + chance.randrange(40)
        data[place] ^= 1 << chance.randrange(8)
        repair(data)
        try:
            verify(memoryview(data), key=sealed.header.key, codecs=CLASSES, max_raw=MAX_RAW)
            verified += 1
            read(memoryview(data), sealed.header.key)
        except CodecError:
            failed += 1
    assert verified > 1000
    assert failed > 300


def test_mutants_allocate_little():
    chance = random.Random(7)
    tracemalloc.start()
    try:
        for number in range(1500):
            sealed = SEEDS[number % len(SEEDS)]
            data = bytearray(sealed.view)
            mutate(data, chance)
            assert_safe(sealed, data, repaired=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


edits = st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 24), st.binary(max_size=24)), min_size=1, max_size=4)


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(which=st.integers(0, len(SEEDS) - 1), edits=edits, repaired=st.booleans())
@example(which=0, edits=[(0, 0, b"")], repaired=False)
def test_edited_containers(which, edits, repaired):
    """Hypothesis picks places, how much to drop there and what to put there instead, and shrinks what fails."""
    data = bytearray(SEEDS[which].view)
    for place, drop, put in edits:
        data[place : place + drop] = put
    assert_safe(SEEDS[which], data, repaired=repaired)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes(data):
    for action in (peek, lambda view: read(view, "k")):
        with pytest.raises(CorruptChunkError):
            action(memoryview(data))


def test_what_was_planted(tmp_path):
    """A pickle whose loading would leave a mark, in place of an entry and inside a sound-looking one."""
    mark = tmp_path / "canary"

    class Canary:
        def __reduce__(self):
            return (mark.touch, ())

    import pickle

    planted = pickle.dumps(Canary())
    for data in (planted, planted.ljust(8192, b"\x00")):
        with pytest.raises(CorruptChunkError):
            read(memoryview(data), "k")
    spec = SegmentSpec(name="", dtype="bytes", shape=(len(planted),))
    sealed = seal_parts([spec], [planted], kind="bytes")
    assert read(memoryview(sealed.bytes), sealed.header.key) == [planted]  # bytes come back as bytes
    assert not mark.exists()


def test_segments_checked_alone_find_the_same_damage():
    sealed = SEEDS[0]
    data = bytearray(sealed.view)
    for segment in sealed.header.segments:
        check_segment(memoryview(data), sealed.header, segment)
        data[sealed.header.payload_offset + segment.offset] ^= 1
        with pytest.raises(CorruptChunkError):
            check_segment(memoryview(data), sealed.header, segment)

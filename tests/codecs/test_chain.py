"""Chains: framing, the ladder between tiers, and lengths that cannot be true."""

import itertools
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chunk.header import MAX_CHAIN, CodecRef
from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs.base import Codec
from kvtier.codecs.chain import CodecChain, Scratch, chain_from_refs
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import CodecError, ConfigError, UnknownPluginError


class Doubled(Codec):
    """Every byte twice."""

    name = "doubled"

    def bound(self, size, spec):
        return 2 * size

    def encode(self, source, into, spec):
        into[: 2 * len(source) : 2] = source
        into[1 : 2 * len(source) : 2] = source
        return 2 * len(source)

    def decode(self, source, into, spec):
        if len(source) != 2 * len(into) or source[::2] != source[1::2]:
            raise CodecError("not doubled")
        into[:] = source[::2]


class Tagged(Codec):
    """A tag behind the bytes."""

    name = "tagged"

    def __init__(self, *, tag="t"):
        self._tag = tag

    def options(self):
        return {"tag": self._tag}

    def bound(self, size, spec):
        return size + len(self._tag)

    def encode(self, source, into, spec):
        into[: len(source)] = source
        into[len(source) : len(source) + len(self._tag)] = self._tag.encode()
        return len(source) + len(self._tag)

    def decode(self, source, into, spec):
        if bytes(source[len(into) :]) != self._tag.encode():
            raise CodecError("another tag")
        into[:] = source[: len(into)]


CLASSES = {"doubled": Doubled, "tagged": Tagged, "zstd": ZstdCodec, "raw": RawCodec}
STEPS = [Doubled(), Tagged(tag="ab"), ZstdCodec(level=2), Tagged(tag="xyz")]


def load(name):
    try:
        return CLASSES[name]
    except KeyError:
        raise UnknownPluginError(name) from None


def spec_of(raw):
    return SegmentSpec(name="", dtype="bytes", shape=(len(raw),))


def encode(chain, raw, scratch=None):
    spec = spec_of(raw)
    into = bytearray(chain.bound(len(raw), spec))
    return bytes(into[: chain.encode(memoryview(raw), memoryview(into), spec, scratch or Scratch())])


def decode(chain, stored, size, scratch=None):
    into = bytearray(size)
    chain.decode(
        memoryview(stored), memoryview(into), SegmentSpec(name="", dtype="bytes", shape=(size,)), scratch or Scratch()
    )
    return bytes(into)


@given(raw=st.binary(max_size=300), count=st.integers(0, len(STEPS)))
def test_round_trip(raw, count):
    chain = CodecChain(STEPS[:count])
    assert decode(chain, encode(chain, raw), len(raw)) == raw


def test_stored_form_is_the_last_output_and_the_lengths_before_it():
    chain = CodecChain([Doubled(), Tagged(tag="ab"), Tagged(tag="xyz")])
    assert encode(chain, b"01") == b"0011abxyz" + struct.pack("<QQ", 4, 6)


def test_one_codec_adds_nothing():
    assert encode(CodecChain([Doubled()]), b"01") == b"0011"


def test_raw_drops_out():
    chain = CodecChain([RawCodec(), Doubled(), RawCodec()])
    assert chain.refs == (CodecRef(name="doubled"),)
    assert len(chain) == 1
    assert repr(chain) == "CodecChain(doubled)"
    assert repr(CodecChain([RawCodec()])) == "CodecChain(raw)"
    assert encode(CodecChain([RawCodec()]), b"abc") == b"abc"


def test_empty_segments_are_stored_as_nothing():
    chain = CodecChain(STEPS)
    assert encode(chain, b"") == b""
    assert decode(chain, b"", 0) == b""
    assert chain.bound(0, spec_of(b"")) == 0
    with pytest.raises(CodecError):
        decode(chain, b"x", 0)
    with pytest.raises(CodecError):
        decode(chain, b"", 1)


def test_lossy_if_any_step_is():
    class Lossy(Doubled):
        name = "lossy"
        lossy = True

    assert not CodecChain(STEPS).lossy
    assert CodecChain([ZstdCodec(), Lossy()]).lossy


@given(raw=st.binary(max_size=200), upper=st.integers(0, len(STEPS)), lower=st.integers(0, len(STEPS)))
def test_ladder_down_and_up_equals_the_whole_chain(raw, upper, lower):
    upper, lower = sorted((upper, lower))
    above, below = CodecChain(STEPS[:upper]), CodecChain(STEPS[:lower])
    assert below.extends(above)
    step = below.missing_after(above.refs)
    stored_above, stored_below = encode(above, raw), encode(below, raw)
    assert encode(step, stored_above) == stored_below
    if upper:
        assert step.decoded_size(memoryview(stored_below)) == len(stored_above)
    assert decode(step, stored_below, len(stored_above)) == stored_above


def test_ladder_in_two_steps():
    chains = [CodecChain(STEPS[:count]) for count in range(len(STEPS) + 1)]
    stored = [encode(chain, b"kvtier" * 20) for chain in chains]
    for (low, a), (high, b) in itertools.combinations(enumerate(stored), 2):
        step = chains[high].missing_after(chains[low].refs)
        assert encode(step, a) == b
    rest = chains[4].missing_after(chains[1].refs)
    assert rest.refs == chains[4].refs[1:]
    assert encode(rest.missing_after(rest.refs[:2]), stored[3]) == stored[4]


def test_what_does_not_extend():
    chain = CodecChain([Doubled(), Tagged(tag="a")])
    assert not chain.extends(CodecChain([Tagged(tag="a")]))
    assert not chain.extends(CodecChain([Doubled(), Tagged(tag="b")]))
    assert not CodecChain([Doubled()]).extends(chain)
    with pytest.raises(CodecError, match="does not begin with tagged"):
        chain.missing_after([CodecRef(name="tagged", options={"tag": "a"})])


def test_a_whole_chain_has_no_decoded_size():
    with pytest.raises(CodecError, match="raw size"):
        CodecChain([Doubled()]).decoded_size(memoryview(b"0011"))


def test_scratch_is_reused_and_given_back():
    scratch, chain = Scratch(), CodecChain(STEPS)
    for size in (10, 4000, 77, 4000):
        raw = bytes(range(256)) * (size // 256 + 1)
        assert decode(chain, encode(chain, raw, scratch), len(raw), scratch) == raw
    held = scratch.size
    assert held >= 2 * 4000
    encode(chain, bytes(5000), scratch)
    assert scratch.size >= held
    scratch.shrink()
    assert scratch.size == 0


@pytest.mark.parametrize("lengths", [(0, 6), (4, 0), (1 << 40, 6), (4, 1 << 40), (4, 7), (5, 6), (1 << 63, 1 << 63)])
def test_lengths_that_cannot_be_true(lengths):
    chain = CodecChain([Doubled(), Tagged(tag="ab"), Tagged(tag="xyz")])
    stored = b"0011abxyz" + struct.pack("<QQ", *lengths)
    tracemalloc.start()
    with pytest.raises(CodecError):
        decode(chain, stored, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_step_up_into_another_size_is_refused():
    step = CodecChain(STEPS[:2]).missing_after(CodecChain(STEPS[:1]).refs)
    stored = encode(CodecChain(STEPS[:2]), b"01")
    for size in (1, 3, 5, 8):
        with pytest.raises(CodecError):
            decode(step, stored, size)


@given(stored=st.binary(max_size=80), size=st.integers(0, 64), done=st.integers(0, 4))
def test_any_bytes_raise_codec_error_or_decode(stored, size, done):
    chain = CodecChain(STEPS)
    chain = chain.missing_after(chain.refs[:done])
    try:
        decode(chain, stored, size)
        if done:
            chain.decoded_size(memoryview(stored))
    except CodecError:
        pass


def test_a_step_up_checks_the_size_that_was_stored():
    step = CodecChain(STEPS[:2]).missing_after(CodecChain(STEPS[:1]).refs)
    assert decode(step, b"0011ab" + struct.pack("<Q", 4), 4) == b"0011"
    for size in (0, 3, 5, 1 << 40):
        with pytest.raises(CodecError, match="does not decode to 4 bytes"):
            decode(step, b"0011ab" + struct.pack("<Q", size), 4)


def test_one_byte_between_two_steps():
    class Same(RawCodec):
        name = "same"

    chain = CodecChain([Same(), Tagged()])
    assert encode(chain, b"x") == b"xt" + struct.pack("<Q", 1)
    assert decode(chain, encode(chain, b"x"), 1) == b"x"


def test_the_last_codec_gets_no_room_for_the_lengths():
    rooms = []

    class Watching(Tagged):
        def encode(self, source, into, spec):
            rooms.append(len(into))
            return super().encode(source, into, spec)

    chain = CodecChain([Doubled(), Watching()])
    encode(chain, b"01")
    assert rooms == [5]


def test_scratch_of_the_same_size_is_the_same():
    scratch = Scratch()
    assert scratch.take(0, 100).obj is scratch.take(0, 100).obj is scratch.take(0, 9).obj
    assert scratch.take(1, 100).obj is not scratch.take(0, 100).obj
    assert len(scratch.take(0, 9)) == 9


def test_too_short_for_the_lengths():
    step = CodecChain(STEPS).missing_after(CodecChain(STEPS[:2]).refs)
    with pytest.raises(CodecError, match="too short"):
        step.decoded_size(memoryview(bytes(24)))
    with pytest.raises(CodecError, match="too short"):
        encode(step, b"12345678")


def test_built_from_refs():
    chain = CodecChain(STEPS)
    again = chain_from_refs(chain.refs, load)
    assert again.refs == chain.refs
    assert encode(again, b"kv" * 50) == encode(chain, b"kv" * 50)


@pytest.mark.parametrize("name", ["pickle", "builtins.eval", "os:system", "kvtier.codecs.zstd:ZstdCodec", ""])
def test_unknown_names_are_left_to_the_registry(name):
    with pytest.raises(UnknownPluginError):
        chain_from_refs([CodecRef(name=name)], load)


@pytest.mark.parametrize("options", [{"speed": 3}, {"level": "9"}, {"level": 0}, {"level": True}, {"level": 1.0}])
def test_options_that_the_codec_does_not_take(options):
    with pytest.raises(CodecError, match="zstd"):
        chain_from_refs([CodecRef(name="zstd", options=options)], load)


def test_too_many_codecs():
    CodecChain([Doubled()] * MAX_CHAIN)
    with pytest.raises(ConfigError, match="at most"):
        CodecChain([Doubled()] * (MAX_CHAIN + 1))
    with pytest.raises(ConfigError, match="at most"):
        CodecChain([Doubled()] * 2, done=MAX_CHAIN - 1)


def test_zstd_needs_its_room():
    source = bytes(range(256))
    for room in (0, 1, 100, 200):
        with pytest.raises(CodecError, match=f"does not fit into {room}"):
            ZstdCodec().encode(memoryview(source), memoryview(bytearray(room)), spec_of(source))


def test_refs_are_values():
    one, same, other = (CodecRef(name="zstd", options={"level": level}) for level in (1, 1, 2))
    assert len({one, same, other}) == 2


@pytest.mark.parametrize("level", [0, 23, -8, "1", True, 1.5, None])
def test_zstd_levels_that_do_not_exist(level):
    with pytest.raises(ConfigError, match="level"):
        ZstdCodec(level=level)


def test_tensors_take_the_same_steps():
    tensor = torch.randn(2, 40, 2, 32).bfloat16()[:, 4:36]
    spec = SegmentSpec(name="k", dtype="bfloat16", shape=tuple(tensor.shape), axes="LTHD", first_token=0)
    dense = memoryview(bytes(tensor.contiguous().view(torch.uint8).numpy()))
    for codecs in ([Int8Codec()], [Int8Codec(), ZstdCodec()], [Int8Codec(), ZstdCodec(), Tagged(tag="x")]):
        chain, scratch = CodecChain(codecs), Scratch()
        assert chain.takes_tensors
        into, other = (memoryview(bytearray(chain.bound(len(dense), spec))) for _ in range(2))
        size = chain.encode_tensor(tensor, into, spec, scratch)
        assert into[:size] == other[: chain.encode(dense, other, spec, scratch)]
        back, raw = torch.zeros(2, 40, 2, 32).bfloat16(), bytearray(len(dense))
        chain.decode_tensor(into[:size], back[:, 4:36], spec, scratch)
        chain.decode(into[:size], memoryview(raw), spec, scratch)
        assert raw == bytes(back[:, 4:36].contiguous().view(torch.uint8).numpy())
        for wrong in (into[: size - 1], into[:3]):
            with pytest.raises(CodecError):
                chain.decode_tensor(wrong, back[:, 4:36], spec, scratch)


def test_chains_that_do_not_take_tensors():
    for chain in (CodecChain(), CodecChain([ZstdCodec()]), CodecChain([Int8Codec(), ZstdCodec()]).missing_after(())):
        if chain.takes_tensors:
            continue
        with pytest.raises(CodecError, match="takes tensors"):
            chain.encode_tensor(torch.zeros(1), memoryview(bytearray(9)), spec_of(b"1234"), Scratch())
    whole = CodecChain([Int8Codec(), ZstdCodec()])
    assert not whole.missing_after(whole.refs[:1]).takes_tensors


def test_a_tensor_without_elements():
    chain, empty = CodecChain([Int8Codec()]), torch.zeros(2, 0, 2, 32).bfloat16()
    spec = SegmentSpec(name="k", dtype="bfloat16", shape=(2, 0, 2, 32), axes="LTHD", first_token=0)
    assert chain.encode_tensor(empty, memoryview(bytearray(9)), spec, Scratch()) == 0
    chain.decode_tensor(memoryview(b""), empty, spec, Scratch())
    with pytest.raises(CodecError):
        chain.decode_tensor(memoryview(b"x"), empty, spec, Scratch())

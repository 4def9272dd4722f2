"""Quantisers on what they stumble over: two routes with the same bytes, bounds on the error, nothing lost twice."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs import fast
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.int4 import Int4Codec, K5V4Codec
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.plan import HEADER
from kvtier.errors import CodecError, ConfigError
from tests.codecs.closeness import assert_within

CODECS = [Int8Codec, Int4Codec, K5V4Codec, Fp8Codec]
HEADS = [1, 7, 48, 64, 96, 127, 128]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

needs_numba = pytest.mark.skipif(not fast._installed, reason="numba is not installed (extra fast)")


@pytest.fixture(params=CODECS, ids=lambda cls: cls.name)
def codec(request):
    return request.param()


@pytest.fixture
def without_numba(monkeypatch):
    monkeypatch.setattr(fast, "_installed", False)


def spec_of(tensor, name="k", axes="LTHD", first_token=0):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SegmentSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), axes=axes, first_token=first_token)


def encode(codec, tensor, spec):
    into = memoryview(bytearray(codec.bound(tensor.nbytes, spec)))
    return bytes(into[: codec.encode_tensor(tensor, into, spec)])


def decode(codec, stored, spec, dtype):
    out = torch.full(spec.shape, 7.0).to(dtype)
    codec.decode_tensor(memoryview(bytearray(stored)), out, spec)
    return out


def numbers(shape, dtype, seed=1, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    values[..., : max(1, shape[-1] // 16)] *= 30  # a few channels are much larger, as real keys have them
    return values.to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def edge_cases():
    shape = (2, 40, 2, 64)
    plain = numbers(shape, torch.float32)
    yield "zeros", torch.zeros(shape)
    yield "negative zeros", torch.full(shape, -0.0)
    yield "one value", torch.full(shape, -1.5)
    yield "all negative", -plain.abs() - 1
    yield (
        "outlier",
        plain.index_put((torch.tensor(1), torch.tensor(20), torch.tensor(0), torch.tensor(5)), torch.tensor(1e30)),
    )
    yield "far from zero", plain * 0.01 + 1000
    yield "subnormal", plain * 1e-39
    yield "smallest", torch.where(plain > 0, 2.0**-133, 0.0)
    yield "largest that is quantised", torch.where(plain > 0, 2.0**125.9, -(2.0**125.9))
    yield "too large to be quantised", torch.where(plain > 2, 3e38, plain)
    for name, odd in (("infinite", float("inf")), ("minus infinite", float("-inf")), ("NaN", float("nan"))):
        one = plain.clone()
        one[1, 13, 1, 40] = odd
        yield name, one
        yield f"mostly {name}", torch.where(plain > -1, odd, plain)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_cases(codec, name, dtype):
    for title, values in edge_cases():
        tensor = values.to(dtype)
        spec = spec_of(tensor, name)
        decoded = decode(codec, encode(codec, tensor, spec), spec, dtype)
        try:
            assert_within(codec, spec, tensor, decoded)
        except AssertionError as exc:
            raise AssertionError(f"{title}: {exc}") from exc


@needs_numba
@pytest.mark.parametrize("axes", ["LTHD", "LHTD", "LTD"])
@pytest.mark.parametrize("head", HEADS)
def test_both_routes_write_and_read_the_same_bytes(codec, axes, head, monkeypatch):
    keys, values = ((16, 256), (65, 0), (130, 256), (205, 256)), ((17, 256), (66, 0))
    for tokens, first, name in (*((*case, "k") for case in keys), *((*case, "v") for case in values)):
        shape = {"LTHD": (2, tokens, 2, head), "LHTD": (2, 2, tokens, head), "LTD": (3, tokens, head)}[axes]
        tensor = numbers(shape, torch.bfloat16, seed=tokens)
        spec = spec_of(tensor, name, axes, first)
        stored = encode(codec, tensor, spec)
        decoded = decode(codec, stored, spec, torch.bfloat16)
        assert_within(codec, spec, tensor, decoded)
        monkeypatch.setattr(fast, "_installed", False)
        assert encode(codec, tensor, spec) == stored, f"{shape} {name}"
        assert torch.equal(bits(decode(codec, stored, spec, torch.bfloat16)), bits(decoded)), f"{shape} {name}"
        monkeypatch.undo()


@needs_numba
@settings(max_examples=60)
@given(
    words=st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32),
    name=st.sampled_from("kv"),
    place=st.integers(0, 3),
)
def test_both_routes_agree_on_any_bits(words, name, place):
    codec = CODECS[place]()
    tensor = torch.tensor(words * 32, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 32, 1, 32)
    spec = spec_of(tensor, name, first_token=512)
    stored = encode(codec, tensor, spec)
    decoded = decode(codec, stored, spec, torch.bfloat16)
    assert_within(codec, spec, tensor, decoded)
    installed, fast._installed = fast._installed, False
    try:
        assert encode(codec, tensor, spec) == stored
        assert torch.equal(bits(decode(codec, stored, spec, torch.bfloat16)), bits(decoded))
    finally:
        fast._installed = installed


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hundred_round_trips_add_nothing(codec, name, dtype):
    cases = [numbers((1, 48, 2, 64), dtype, seed=seed, scale=scale) for seed, scale in ((1, 1.0), (2, 1e-3), (3, 1e4))]
    cases.append((numbers((1, 48, 2, 64), torch.float32) * 0.01 + 100).to(dtype))
    cases.append((-numbers((1, 48, 2, 64), torch.float32).abs() - 1e-6).to(dtype))
    for tensor in cases:
        spec = spec_of(tensor, name)
        now = tensor
        for _ in range(100 if name == "k" else 20):
            now = decode(codec, encode(codec, now, spec), spec, dtype)
        assert_within(codec, spec, tensor, now)
        once = decode(codec, encode(codec, tensor, spec), spec, dtype)
        assert torch.equal(bits(now), bits(once)), "the first round trip was the only one that changed anything"


@pytest.mark.parametrize("axes", ["LTHD", "LHTD"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_any_strides_give_the_same_as_dense(codec, axes, name):
    token = axes.index("T")
    shape = (2, 96, 3, 64) if axes == "LTHD" else (2, 3, 96, 64)
    whole = numbers(shape, torch.bfloat16)
    sources = {
        "slice of tokens": whole.narrow(token, 16, 64),
        "every other layer": torch.stack([whole, whole], 1).flatten(0, 1)[::2].narrow(token, 16, 64),
        "transposed": whole.transpose(1, 2).contiguous().transpose(1, 2).narrow(token, 16, 64),
        "channels apart": torch.stack([whole, whole], -1)[..., 0].narrow(token, 16, 64),
    }
    spec = spec_of(sources["slice of tokens"], name, axes, first_token=0)
    wanted = encode(codec, sources["slice of tokens"].contiguous(), spec)
    dense = decode(codec, wanted, spec, torch.bfloat16)
    for title, source in sources.items():
        assert encode(codec, source, spec) == wanted, title
        around = torch.zeros_like(whole) if title != "channels apart" else torch.zeros(*shape, 2).bfloat16()[..., 0]
        if title == "transposed":
            around = around.transpose(1, 2).contiguous().transpose(1, 2)
        target = around.narrow(token, 16, 64)
        codec.decode_tensor(memoryview(bytearray(wanted)), target, spec)
        assert torch.equal(target, dense), title
        assert not around.narrow(token, 0, 16).any(), title
        assert not around.narrow(token, 80, 16).any(), title


@pytest.mark.parametrize("name", ["k", "v"])
def test_the_first_tokens_of_a_prompt_are_kept(codec, name):
    tensor = numbers((2, 64, 2, 64), torch.bfloat16)
    for first, kept in ((0, 4), (1, 3), (3, 1), (4, 0), (256, 0), (-1, 0)):
        spec = spec_of(tensor, name, first_token=first)
        decoded = decode(codec, encode(codec, tensor, spec), spec, torch.bfloat16)
        assert torch.equal(decoded[:, :kept], tensor[:, :kept])
        assert not torch.equal(decoded[:, kept], tensor[:, kept])


@pytest.mark.parametrize(
    "spec",
    [
        SegmentSpec(name="k", dtype="int8", shape=(2, 64, 2, 64), axes="LTHD", first_token=0),
        SegmentSpec(name="k", dtype="float8_e4m3fn", shape=(2, 64, 2, 64), axes="LTHD", first_token=0),
        SegmentSpec(name="k", dtype="bfloat16", shape=(2, 64, 2, 64), axes="", first_token=0),
        SegmentSpec(name="latent", dtype="bfloat16", shape=(2, 64, 576), axes="LTD", first_token=0),
        SegmentSpec(name="k_scale", dtype="float32", shape=(2, 64, 2, 64), axes="LTHD", first_token=0),
        SegmentSpec(name="k", dtype="bfloat16", shape=(2, 15, 2, 64), axes="LTHD", first_token=256),
        SegmentSpec(name="v", dtype="bfloat16", shape=(2, 64, 2, 7), axes="LTHD", first_token=0),
        SegmentSpec(name="", dtype="bytes", shape=(999,)),
        SegmentSpec(name="k", dtype="bfloat16", shape=()),
    ],
    ids=lambda spec: f"{spec.name} {spec.dtype} {list(spec.shape)} {spec.axes}",
)
def test_what_is_not_quantised_is_stored_exactly(codec, spec):
    from kvtier.chunk.dtypes import raw_size

    raw = torch.randint(0, 256, (raw_size(spec.dtype, spec.shape),), dtype=torch.uint8).numpy().tobytes()
    into, back = memoryview(bytearray(codec.bound(len(raw), spec))), bytearray(len(raw))
    size = codec.encode(memoryview(raw), into, spec)
    assert size == HEADER + len(raw)
    codec.decode(into[:size], memoryview(back), spec)
    assert back == raw


def test_sizes():
    tensor = numbers((4, 256, 2, 64), torch.bfloat16)
    for cls, most in (
        (Int8Codec, {"k": 8.13, "v": 8.26}),
        (Int4Codec, {"k": 4.51, "v": 4.51}),
        (K5V4Codec, {"k": 5.26, "v": 4.51}),
    ):
        for name in "kv":
            spec = spec_of(tensor, name, first_token=256)
            stored = encode(cls(), tensor, spec)
            assert 8 * len(stored) / tensor.numel() <= most[name], f"{cls.name} {name}"


def test_a_block_of_sixteen_tokens_gets_smaller(codec):
    for name in "kv":
        tensor = numbers((2, 16, 2, 64), torch.bfloat16)
        spec = spec_of(tensor, name, first_token=16)
        stored = encode(codec, tensor, spec)
        assert len(stored) < 0.66 * tensor.nbytes
        assert_within(codec, spec, tensor, decode(codec, stored, spec, torch.bfloat16))


def test_a_segment_in_the_form_before_is_refused():
    tensor = numbers((1, 256, 1, 64), torch.bfloat16)
    spec = spec_of(tensor, "k", first_token=256)
    stored = bytearray(encode(K5V4Codec(), tensor, spec))
    stored[1] = 1  # its keys had one group
    with pytest.raises(CodecError, match="a form that this version does not read"):
        decode(K5V4Codec(), bytes(stored), spec, torch.bfloat16)


def test_exceptions_that_lie_are_refused():
    codec = Int8Codec()
    tensor = numbers((1, 64, 1, 64), torch.bfloat16)
    tensor[0, 40, 0, 3] = float("inf")
    spec = spec_of(tensor, "v")
    stored = bytearray(encode(codec, tensor, spec))
    plan = codec.plan(spec)
    assert len(stored) == plan.size + 64 * 2, "one group is kept"
    stored[8:16] = (63).to_bytes(8, "little")
    with pytest.raises(CodecError):
        decode(codec, stored[:-2], spec, torch.bfloat16)
    stored[8:16] = (64).to_bytes(8, "little")
    at = plan.limits_at + 2 * 36  # the marked token's limit: 40, less the four sinks
    assert stored[at : at + 2] == b"\xff\xff"
    stored[at : at + 2] = b"\x00\x40"
    with pytest.raises(CodecError, match="64 elements were kept exactly, 0 are marked"):
        decode(codec, stored, spec, torch.bfloat16)


@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_kept_lies_behind_an_odd_number_of_codes(codec, name):
    tensor = numbers((1, 17, 1, 127), torch.bfloat16)
    tensor[0, 9, 0, 3] = float("inf")
    spec = spec_of(tensor, name, first_token=256)
    stored = encode(codec, tensor, spec)
    assert codec.plan(spec).size % 2 or codec.name != "int8"
    assert stored[:1] == b"Q"
    assert_within(codec, spec, tensor, decode(codec, stored, spec, torch.bfloat16))


def test_float8_and_integers_from_an_engine_are_bit_exact_also_without_numba(codec, without_numba):
    for dtype in (torch.float8_e4m3fn, torch.int8):
        raw = torch.randint(-128, 128, (2, 64, 2, 64), dtype=torch.int8).view(dtype)
        spec = spec_of(raw)
        assert torch.equal(bits(decode(codec, encode(codec, raw, spec), spec, dtype)), bits(raw))


@pytest.mark.parametrize(
    "options", [{"group": 15}, {"group": 257}, {"group": 64.0}, {"group": True}, {"sinks": -1}, {"sinks": 65}]
)
def test_options_out_of_range(codec, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        type(codec)(**options)


def test_a_numba_that_cannot_be_imported_is_no_numba(monkeypatch, caplog):
    monkeypatch.setattr(fast, "_installed", True)
    monkeypatch.setattr(fast, "_compiled", {})
    monkeypatch.setitem(sys.modules, "kvtier.codecs._numba", None)
    monkeypatch.delattr("kvtier.codecs._numba", raising=False)
    tensor = numbers((1, 32, 1, 64), torch.bfloat16)
    stored = encode(Int8Codec(), tensor, spec_of(tensor))
    assert "numba cannot be used" in caplog.text
    monkeypatch.undo()
    assert encode(Int8Codec(), tensor, spec_of(tensor)) == stored

"""Blobs of every kind, dtype and layout through a container and back, bit for bit."""

import gc
import mmap
import weakref
from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chunk.blob import copy_part, describe_blob, rebuild
from kvtier.chunk.container import Header, payload_offset, payload_size, plan_segments, seal, segment_view, verify
from kvtier.chunk.dtypes import ITEMSIZE
from kvtier.codecs.chain import CodecChain, Scratch
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import InvalidValueError

DTYPES = [getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name) and name != "bytes"]
REQUIRED = "bfloat16 float16 float32 float64 float8_e4m3fn float8_e5m2 int8 int16 int32 int64 uint8 bool complex64"
SHAPES = [(), (0,), (0, 4), (1,), (7,), (2, 3, 4, 2, 3)]


def stored(blob, chain=None):
    """The blob as a container: what a tier would hold."""
    chain, scratch = chain or CodecChain(), Scratch()
    parts = describe_blob(blob)
    encoded = []
    for spec, source in zip(parts.specs, parts.sources, strict=True):
        segment = plan_segments([spec], [0])[0]
        raw = memoryview(bytearray(b"\xee" * segment.raw))
        copy_part(source, raw)
        into = memoryview(bytearray(chain.bound(segment.raw, spec)))
        encoded.append(into[: chain.encode(raw, into, spec, scratch)])
    segments = plan_segments(parts.specs, [len(item) for item in encoded])
    offset = payload_offset(parts.specs, "key")
    view = memoryview(bytearray(offset + payload_size(segments)))
    for segment, item in zip(segments, encoded, strict=True):
        view[offset + segment.offset : offset + segment.offset + segment.stored] = item
    header = Header(key="key", namespace="", kind=parts.kind, chain=chain.refs, segments=segments, created=0.0)
    seal(view, header, payload_offset=offset, size=len(view))
    return view


def loaded(view, chain=None):
    chain, scratch = chain or CodecChain(), Scratch()
    header = verify(view, key="key", codecs={"zstd"}, max_raw=1 << 30)
    raws = []
    for segment in header.segments:
        raw = memoryview(bytearray(segment.raw))
        chain.decode(segment_view(view, header, segment), raw, segment.spec, scratch)
        raws.append(raw)
    return rebuild(header, raws)


def through(blob, chain=None):
    return loaded(stored(blob, chain), chain)


def bits(tensor):
    """The elements' bytes in row-major order, read one element at a time: a slow way of its own."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return [bytes(element.reshape(1).view(torch.uint8).tolist()) for element in flat]


def assert_same(found, given):
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape) == (given.dtype, given.shape)
    assert bits(found) == bits(given)


def patterns(dtype, shape):
    """Random bits: NaN payloads, infinities, subnormals, -0.0 among them; 0 and 1 for bool."""
    count = 1
    for length in shape:
        count *= length
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return (raw % 2).view(torch.bool).reshape(shape)
    return raw.view(dtype).reshape(shape)


def test_the_required_dtypes_are_in_the_table():
    assert set(REQUIRED.split()) <= set(ITEMSIZE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype, shape):
    tensor = patterns(dtype, shape)
    assert_same(through(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.complex64], ids=str)
def test_through_zstd(dtype):
    chain = CodecChain([ZstdCodec()])
    for shape in SHAPES:
        tensor = patterns(dtype, shape)
        assert_same(through(tensor, chain), tensor)


base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
LAYOUTS = {
    "transposed": base[0, 0].t(),
    "permuted": base.permute(3, 1, 0, 2),
    "strided": base[:, ::2, :, 1::3],
    "last axis strided": base[..., ::2],
    "offset": base.reshape(-1)[3:],
    "odd offset of bytes": torch.arange(64, dtype=torch.uint8)[3:51].reshape(6, 8)[1:, :],
    "rows of whole words, odd offset": torch.arange(100, dtype=torch.int16)[1:97].reshape(8, 12)[:, :8],
    "expanded": torch.tensor([1.5, 2.5]).reshape(2, 1).expand(2, 7),
    "scalar expanded": torch.tensor(2.0).expand(3, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "view into a large storage": torch.zeros(1 << 22, dtype=torch.int16)[1000:1010],
    "requires grad": torch.randn(3, requires_grad=True),
    "result with a graph": torch.randn(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
    "conjugated and transposed": torch.randn(2, 5, dtype=torch.complex128).mH,
    "negated": torch.randn(5, dtype=torch.complex64).conj().imag,
    "complex128": torch.randn(3, 4, dtype=torch.complex128)[:, 1:3],
    "unfolded": torch.arange(10).unfold(0, 4, 2),
    "flipped twice": base.flip(0).flip(0)[1],
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout(tensor):
    assert_same(through(tensor), tensor)


def test_lazy_bits_are_what_they_say():
    """Guards the list above: torch may stop making such views."""
    assert LAYOUTS["conjugated"].is_conj()
    assert LAYOUTS["negated"].is_neg()


def test_inference_tensors_and_inference_mode():
    with torch.inference_mode():
        tensor = torch.randn(3, 4)
        view = stored(tensor)
        assert_same(through(tensor), tensor)
    assert tensor.is_inference()
    assert_same(loaded(view), tensor)
    with torch.no_grad():
        assert_same(through(base), base)


def test_bool_keeps_its_bytes():
    """A bool made over foreign memory may hold any byte."""
    tensor = torch.tensor([0, 1, 2, 255, 128], dtype=torch.uint8).view(torch.bool)
    found = through(tensor)
    assert found.view(torch.uint8).tolist() == [0, 1, 2, 255, 128]


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_any_float_bits(words):
    tensor = torch.tensor(words, dtype=torch.uint32).view(torch.float32)
    assert bits(through(tensor)) == [word.to_bytes(4, "little") for word in words]


def test_stored_size_is_the_logical_size():
    huge = torch.zeros(1 << 24, dtype=torch.uint8)
    assert len(stored(huge[5:15])) == 8192
    assert describe_blob(huge[5:15]).raw == 10
    assert describe_blob(torch.zeros(1).expand(1000)).raw == 4000


def test_described_without_copying():
    tensor = torch.randn(4, 6)
    parts = describe_blob({"x": tensor.t()})
    assert parts.sources[0].data_ptr() == tensor.data_ptr()
    assert parts.sources[0].stride() == (1, 6)
    raw = bytearray(b"abc")
    assert describe_blob(raw).sources[0].obj is raw


# Mappings and bytes


@pytest.mark.parametrize("kind", [dict, OrderedDict, MappingProxyType])
def test_mappings(kind):
    names = {"b": torch.randn(3), "": torch.tensor(1), "a/b\x00 名": torch.zeros(0, 4, dtype=torch.bool)}
    found = through(kind(names))
    assert type(found) is dict
    assert list(found) == list(names)
    for name, tensor in names.items():
        assert_same(found[name], tensor)


def test_empty_mapping():
    assert through({}) == {}


def test_one_tensor_twice_in_a_mapping():
    tensor = torch.randn(3)
    found = through({"a": tensor, "b": tensor[1:]})
    assert_same(found["a"], tensor)
    assert_same(found["b"], tensor[1:])


def shared_pages():
    pages = mmap.mmap(-1, 4096)
    pages[:5] = b"pages"
    return memoryview(pages)[:5]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"x",
        bytes(5000),
        bytearray(b"abc"),
        memoryview(b"view")[1:3],
        memoryview(b"abcdefgh").cast("I"),
        shared_pages(),
    ],
)
def test_byte_strings_come_back_as_bytes(blob):
    found = through(blob)
    assert type(found) is bytes
    assert found == bytes(blob)


def test_large_read_only_bytes():
    raw = bytes(range(256)) * (3 << 12) + b"tail"
    assert through(raw) == raw
    assert through(bytearray(raw)) == raw


# What cannot be stored


UNSTORABLE = {
    "sparse_coo": lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2)),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
    "subclass": lambda: torch.zeros(2).as_subclass(type("Odd", (torch.Tensor,), {})),
    "bits8": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
}


@pytest.mark.filterwarnings("ignore")  # torch warns about sparse and quantised tensors themselves
@pytest.mark.parametrize(("kind", "make"), UNSTORABLE.items(), ids=UNSTORABLE.keys())
def test_tensors_that_cannot_be_stored(kind, make):
    names = {"subclass": "Odd"}
    for blob in (make(), {"fine": torch.zeros(1), "bad": make()}):
        with pytest.raises(InvalidValueError, match=names.get(kind, kind)):
            describe_blob(blob)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        ("text", "str"),
        (None, "NoneType"),
        (1.5, "float"),
        ([torch.zeros(1)], "list"),
        (object(), "object"),
        ({1: torch.zeros(1)}, "names in a mapping are str, not int"),
        ({"a": b"bytes"}, "'a' is a bytes"),
        ({"a": None}, "'a' is a NoneType"),
        ({"a": {"b": torch.zeros(1)}}, "'a' is a dict"),
        (memoryview(b"abcdef")[::2], "gaps"),
    ],
)
def test_other_objects(blob, message):
    with pytest.raises(InvalidValueError, match=message):
        describe_blob(blob)


def test_numpy_arrays_are_not_taken_for_bytes():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(InvalidValueError, match="ndarray"):
        describe_blob(numpy.zeros(3))


# Memory


def test_tensors_share_the_views_and_keep_them_alive():
    class Owner(bytearray):
        pass

    view = stored({"a": torch.ones(4), "b": torch.zeros(2)})
    header = verify(view, key="key", codecs=(), max_raw=100)
    owner = Owner(view)
    gone = weakref.ref(owner)
    views = [segment_view(memoryview(owner), header, segment) for segment in header.segments]
    del owner
    found = rebuild(header, views)
    found["a"][0] = 7.0
    assert bytes(views[0][:4]) == b"\x00\x00\xe0\x40"
    del views, found["b"]
    gc.collect()
    assert gone() is not None
    assert found["a"].tolist() == [7.0, 1.0, 1.0, 1.0]
    del found
    gc.collect()
    assert gone() is None

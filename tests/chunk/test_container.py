"""What a container looks like, byte for byte, and what is refused."""

import dataclasses
import struct
from pathlib import Path

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chunk import container as module
from kvtier.chunk.container import (
    PAGE,
    CodecRef,
    Header,
    payload_offset,
    payload_size,
    peek,
    plan_segments,
    seal,
    segment_view,
    verify,
)
from kvtier.chunk.segments import Segment, SegmentSpec
from kvtier.errors import CorruptChunkError, InvalidValueError
from kvtier.testing.containers import KEY, NAMESPACE, SAMPLES, coded_container, kv_container, kv_specs, seal_parts

GOLDEN = Path(__file__).parent / "golden"
CODECS = {"int8", "zstd"}


def check(view, *, key=KEY, namespace=None, codecs=CODECS, max_raw=1 << 20):
    return verify(view, key=key, namespace=namespace, codecs=codecs, max_raw=max_raw)


def test_verify_returns_what_seal_returned(container):
    found = check(container.view, key=container.header.key, namespace=container.header.namespace)
    assert found == container.header
    assert peek(container.view) == container.header
    assert peek(container.view[: container.header.payload_offset]) == container.header
    stored = [bytes(segment_view(container.view, found, segment)) for segment in found.segments]
    assert tuple(stored) == container.stored
    assert found.size == len(container.view)


def test_fields_come_back():
    header = coded_container().header
    assert header.chain == (
        CodecRef(name="int8", options={"group": 32, "symmetric": True}),
        CodecRef(name="zstd", options={"level": 1}),
    )
    assert (header.lossy, header.expires, header.epoch, header.tokens) == (True, 1_800_000_000.5, 7, 200)
    assert header.raw == 2 * 2 * 200 * 3 * 4 * 2


def test_stored_form_read_by_other_means():
    """The format as the design page has it, read with struct, msgpack and xxhash alone."""
    sealed = kv_container()
    data = sealed.bytes
    magic, version, flags, length, offset, payload, checksum = struct.unpack_from("<8sHHIQQQ", data)
    assert (magic, version, flags) == (b"\x89KVT\r\n\x1a\n", 1, 0)
    assert offset == 4096
    assert offset + payload == len(data)
    assert checksum == xxhash.xxh3_64_intdigest(data[:32] + data[40:offset])
    assert data[40 + length : offset] == bytes(offset - 40 - length)
    fields = msgpack.unpackb(data[40 : 40 + length])
    shape = [2, 5, 3, 4]
    sums = [xxhash.xxh3_64_intdigest(item) for item in sealed.stored]
    assert fields == {
        "key": KEY,
        "namespace": NAMESPACE,
        "parent": sealed.header.parent,
        "kind": "kv",
        "chain": [],
        "segments": [
            ["k", "bfloat16", shape, "LTHD", 256, 0, 240, 240, sums[0]],
            ["v", "bfloat16", shape, "LTHD", 256, 4096, 240, 240, sums[1]],
        ],
        "tokens": 5,
        "created": 1_700_000_000.25,
        "expires": None,
        "lossy": False,
        "epoch": 0,
    }
    assert data[offset : offset + 240] == sealed.stored[0]
    assert data[offset + 4096 : offset + 4336] == sealed.stored[1]
    assert data[offset + 240 : offset + 4096] == bytes(4096 - 240)


def test_deterministic_whatever_the_memory_held():
    assert kv_container(paint=0x00).bytes == kv_container(paint=0xFF).bytes


def test_sealing_again_changes_nothing(container):
    before = container.bytes
    header = container.header
    assert seal(container.view, header, payload_offset=header.payload_offset, size=header.size) == header
    assert container.bytes == before


def test_a_known_checksum_is_kept():
    """So a value that was verified when it was read is not hashed again, and damage since then shows."""
    sealed = kv_container()
    sealed.view[sealed.header.payload_offset] ^= 1
    seal(sealed.view, sealed.header, payload_offset=sealed.header.payload_offset, size=sealed.header.size)
    with pytest.raises(CorruptChunkError, match="checksum of segment 'k'"):
        check(sealed.view)


@pytest.mark.parametrize("name", ["kv", "coded", "mapping", "bytes", "empty"])
def test_entries_written_by_the_first_release_are_read(name):
    """Format 1 is fixed: these bytes must be readable, and made again, for as long as format 1 is."""
    stored = (GOLDEN / f"format-1-{name}.kvt").read_bytes()
    sealed = SAMPLES[name]()
    assert check(memoryview(stored), key=sealed.header.key) == sealed.header
    assert sealed.bytes == stored


def test_this_format_and_the_one_before_are_read():
    assert {module.FORMAT, module.FORMAT - 1} - {0} == module.READABLE


# Places


def test_segments_start_at_pages_in_order():
    specs = [SegmentSpec(name=str(i), dtype="uint8", shape=(n,)) for i, n in enumerate((1, 4096, 4097, 0, 9))]
    segments = plan_segments(specs, [1, 4096, 4097, 0, 9])
    assert [segment.offset for segment in segments] == [0, 4096, 8192, 16384, 16384]
    assert payload_size(segments) == 20480
    assert [segment.raw for segment in segments] == [1, 4096, 4097, 0, 9]


def test_payload_offset_depends_on_the_layout_alone():
    offsets = {payload_offset(kv_specs(tokens), key) for tokens in (0, 1, 256, 1 << 40) for key in (KEY, KEY[::-1])}
    assert offsets == {4096}


specs_strategy = st.lists(
    st.builds(
        SegmentSpec,
        name=st.text(max_size=40),
        dtype=st.just("float8_e4m3fnuz"),
        shape=st.lists(st.sampled_from([0, 1, 2, 200, 70_000, 1 << 40]), max_size=4).map(tuple),
        axes=st.just(""),
        first_token=st.sampled_from([-1, 0, 1 << 52]),
    ),
    max_size=40,
    unique_by=lambda spec: spec.name,
)


@given(specs=specs_strategy, key=st.text(min_size=1, max_size=1024), long=st.booleans())
def test_the_largest_header_fits_before_the_payload(specs, key, long):
    """Worst-case numbers in every field, a chain of the usual length: what `payload_offset` reserves is enough."""
    specs = [spec for spec in specs if payload_raw(spec) is not None]
    assert payload_offset(specs, key) % PAGE == 0
    segments = tuple(
        Segment(spec=spec, offset=0, stored=0 if 0 in spec.shape else 1, raw=payload_raw(spec), checksum=(1 << 64) - 1)
        for spec in specs
    )
    header = Header(
        key=key,
        namespace="n" * 120 if long else "",
        parent=key if long else None,
        kind="mapping",
        chain=tuple(CodecRef(name="codec-of-16-char", options={"level_of_option": 1 << 40}) for _ in range(8)),
        segments=segments,
        tokens=1 << 52,
        created=1.1,
        expires=1e300,
        lossy=True,
        epoch=1 << 52,
    )
    # Not compared with the offset itself: rounding up to a page would hide a sum that is too small.
    assert module._FRONT + len(module._pack(header)) <= module._largest_front(specs, key) <= payload_offset(specs, key)


def payload_raw(spec):
    try:
        return plan_segments([spec], [0])[0].raw
    except InvalidValueError:
        return None


@pytest.mark.parametrize(
    ("specs", "key", "message"),
    [
        ([SegmentSpec(name=str(i), dtype="uint8", shape=()) for i in range(2049)], "k", "2049 tensors"),
        ([SegmentSpec(name="n" * 1025, dtype="uint8", shape=())], "k", "tensor name of 1025 bytes"),
        ([SegmentSpec(name="\ud800", dtype="uint8", shape=())], "k", "not valid Unicode"),
        ([], "k" * 4097, "key of 4097 bytes"),
        (
            [SegmentSpec(name=f"{i:04}" * 100, dtype="uint8", shape=()) for i in range(2000)],
            "k",
            "names of 2000 tensors",
        ),
    ],
)
def test_values_that_have_no_place(specs, key, message):
    with pytest.raises(InvalidValueError, match=message):
        payload_offset(specs, key)


def test_a_mapping_of_as_many_tensors_as_possible():
    specs = [SegmentSpec(name=f"layers.{i}.k", dtype="uint8", shape=(1,)) for i in range(2048)]
    sealed = seal_parts(specs, [b"x"] * 2048, kind="mapping")
    assert check(sealed.view) == sealed.header


# What seal refuses: nothing may be written that could not be read again


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "pickle"},
        {"kind": "tensor"},  # two named segments
        {"kind": "bytes"},
        {"created": float("nan")},
        {"expires": float("inf")},
        {"tokens": -1},
        {"tokens": True},
        {"epoch": 1 << 60},
        {"parent": "\ud800"},
        {"namespace": "n" * 5000},
        {"chain": (CodecRef(name="c" * 65),)},
        {"chain": tuple(CodecRef(name="c") for _ in range(9))},
        {"chain": (CodecRef(name="c", options={"o": "x" * 65}),)},
        {"chain": (CodecRef(name="c", options={"o": [1]}),)},
        {"chain": (CodecRef(name="c", options={"o": ...}),)},
        {"chain": (CodecRef(name="c", options={str(i): i for i in range(17)}),)},
        {"lossy": 1},
    ],
    ids=str,
)
def test_unreadable_headers_are_not_written(fields):
    with pytest.raises(InvalidValueError):
        kv_container(**fields)


@pytest.mark.parametrize(
    "segments",
    [
        lambda k, v: (k, dataclasses.replace(v, offset=0)),
        lambda k, v: (k, dataclasses.replace(v, spec=k.spec)),
        lambda k, v: (k, dataclasses.replace(v, raw=239)),
        lambda k, v: (k, dataclasses.replace(v, stored=239)),
        lambda k, v: (v, k),
        lambda k, v: (k, dataclasses.replace(v, spec=dataclasses.replace(v.spec, dtype="pickle"))),
        lambda k, v: (
            k,
            dataclasses.replace(v, spec=dataclasses.replace(v.spec, dtype="bytes", shape=(240,), axes="")),
        ),
        lambda k, v: (k, dataclasses.replace(v, spec=dataclasses.replace(v.spec, axes="LTD"))),
    ],
)
def test_segment_tables_that_make_no_sense_are_not_written(segments):
    header = kv_container().header
    view = memoryview(bytearray(header.size))
    header = dataclasses.replace(header, segments=segments(*header.segments))
    with pytest.raises(InvalidValueError):
        seal(view, header, payload_offset=header.payload_offset, size=len(view))


def test_headers_that_would_read_back_as_something_else_are_not_written():
    """A shape that is a list looks right, but is not equal to what readers get."""
    spec = SegmentSpec(name="k", dtype="uint8", shape=[3])
    with pytest.raises(InvalidValueError, match="reads back as"):
        seal_parts([spec], [b"abc"])


def test_sizes_must_add_up():
    header = kv_container().header
    for size, offset, memory in (
        (12288, 8192, 12288),
        (12289, 4096, 12289),
        (12288, 4096, 12287),
        (12200, 4008, 12288),
    ):
        with pytest.raises(InvalidValueError, match="do not add up"):
            seal(memoryview(bytearray(memory)), header, payload_offset=offset, size=size)


def test_header_must_fit():
    header = dataclasses.replace(kv_container().header, namespace="n" * 4000)
    with pytest.raises(InvalidValueError, match="does not fit"):
        seal(memoryview(bytearray(header.size)), header, payload_offset=4096, size=header.size)


# What verify refuses


def test_another_key_or_namespace():
    view = kv_container().view
    check(view, namespace=NAMESPACE)
    with pytest.raises(CorruptChunkError, match="holds key"):
        check(view, key=KEY[:-1] + "0")
    with pytest.raises(CorruptChunkError, match="of namespace"):
        check(view, namespace="another")


def test_swapped_entries():
    """Two whole, sound entries whose names were exchanged on the medium."""
    one, two = kv_container(), kv_container(key=KEY.replace("0", "1"))
    for name, view in ((one.header.key, two.view), (two.header.key, one.view)):
        with pytest.raises(CorruptChunkError, match="holds key"):
            check(view, key=name)


@pytest.mark.parametrize("name", ["zstd", "int8"])
def test_codec_that_is_not_registered(name):
    with pytest.raises(CorruptChunkError, match=f"unknown codec '{name}'"):
        check(coded_container().view, codecs=CODECS - {name})


@pytest.mark.parametrize("name", ["pickle", "builtins.eval", "os.system", "torch.load"])
def test_planted_codec_name(name):
    sealed = kv_container(chain=(CodecRef(name=name),))
    with pytest.raises(CorruptChunkError, match="unknown codec"):
        check(sealed.view)


def test_larger_than_the_cap():
    view = kv_container().view
    check(view, max_raw=480)
    with pytest.raises(CorruptChunkError, match="480 bytes; at most 479"):
        check(view, max_raw=479)


def test_every_length_but_the_right_one(container):
    data, key = container.bytes, container.header.key
    lengths = {*range(100), *range(0, len(data), 501), len(data) - 1, len(data) - 4096, len(data) // 2}
    for length in lengths - {len(data)}:
        with pytest.raises(CorruptChunkError):
            check(memoryview(data)[:length], key=key)
    for surplus in (b"\x00", b"junk", bytes(4096), data):
        with pytest.raises(CorruptChunkError):
            check(memoryview(data + surplus), key=key)


def test_a_segment_without_checksum_or_with_foreign_padding():
    sealed = kv_container()
    sealed.view[sealed.header.payload_offset + 240] = 1
    with pytest.raises(CorruptChunkError, match="padding behind segment 'k'"):
        check(sealed.view)


def test_one_segment_can_be_checked_alone():
    sealed = kv_container()
    k, v = sealed.header.segments
    start = sealed.header.payload_offset
    module.check_segment(sealed.view[: start + 4096], sealed.header, k)
    with pytest.raises(CorruptChunkError, match="'v' is cut short"):
        module.check_segment(sealed.view[: start + 4096 + 240], sealed.header, v)

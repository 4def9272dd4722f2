"""Headers: how much of a container they need, and every way in which they can be wrong."""

import contextlib
import struct

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chunk.container import NeedMore, peek, verify
from kvtier.chunk.segments import SegmentSpec
from kvtier.errors import CodecError, CorruptChunkError
from kvtier.testing.containers import kv_container, seal_parts


def test_peek_says_how_much_it_needs():
    sealed = seal_parts(
        [SegmentSpec(name=f"layer {i}", dtype="uint8", shape=(1,)) for i in range(99)], [b"x"] * 99, kind="mapping"
    )
    offset = sealed.header.payload_offset
    assert offset > 4096
    with pytest.raises(NeedMore) as caught:
        peek(sealed.view[:4096])
    assert caught.value.size == offset
    assert peek(sealed.view[:offset]) == sealed.header


def front(*, magic=b"\x89KVT\r\n\x1a\n", version=1, flags=0, header=b"", offset=4096, payload=0, length=None):
    """A preamble of one's own, with a right checksum."""
    length = len(header) if length is None else length
    before = struct.pack("<8sHHIQQ", magic, version, flags, length, offset, payload)
    rest = header.ljust(max(min(offset, 1 << 20) - 40, 0), b"\x00")
    return memoryview(before + struct.pack("<Q", xxhash.xxh3_64_intdigest(before + rest)) + rest)


def test_the_helper_makes_what_peek_reads():
    sealed = kv_container()
    length = struct.unpack_from("<I", sealed.view, 12)[0]
    made = front(header=sealed.bytes[40 : 40 + length], payload=8192)
    assert peek(made) == sealed.header


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": b"\x80\x04pickle"}, "wrong magic"),
        ({"version": 0}, "container format 0; readable: 1"),
        ({"version": 2}, "container format 2"),
        ({"flags": 1}, "lengths"),
        ({"offset": 4097}, "lengths"),
        ({"offset": 0}, "lengths"),
        ({"offset": 1 << 62}, "lengths"),
        ({"offset": (1 << 19) + 4096}, "lengths"),
        ({"payload": 1}, "lengths"),
        ({"length": 4057}, "lengths"),
        ({"length": (1 << 32) - 1}, "lengths"),
        ({}, "msgpack"),
    ],
    ids=str,
)
def test_preambles_that_make_no_sense(fields, message):
    with pytest.raises(CorruptChunkError, match=message) as caught:
        peek(front(**fields))
    assert not isinstance(caught.value, NeedMore)


def test_need_more_never_asks_for_much():
    with pytest.raises(NeedMore) as caught:
        peek(front(offset=1 << 19)[:4096])
    assert caught.value.size == 1 << 19
    with pytest.raises(CorruptChunkError, match="cut short"):
        verify(front(offset=1 << 19)[:4096], key="k", codecs=(), max_raw=1)


GOOD = {
    "key": "k",
    "namespace": "n",
    "parent": None,
    "kind": "kv",
    "chain": [],
    "segments": [["k", "uint8", [3], "", -1, 0, 3, 3, 5]],
    "tokens": 0,
    "created": 1.0,
    "expires": None,
    "lossy": False,
    "epoch": 0,
}


def with_field(**fields):
    return {**GOOD, **fields}


def segment(**at):
    row = list(GOOD["segments"][0])
    for index, value in at.items():
        row[int(index[1:])] = value
    return with_field(segments=[row])


BAD = {
    "not a map": [1, 2],
    "a number": 7,
    "missing field": {name: value for name, value in GOOD.items() if name != "epoch"},
    "extra field": with_field(__reduce__="os.system"),
    "key of bytes": with_field(key=b"k"),
    "key of another type": with_field(key=1),
    "no key": with_field(key=None),
    "long key": with_field(key="k" * 4097),
    "parent of another type": with_field(parent=0),
    "unknown kind": with_field(kind="pickle"),
    "chain of another type": with_field(chain={"zstd": 1}),
    "codec as a name": with_field(chain=["zstd"]),
    "codec without options": with_field(chain=[["zstd"]]),
    "codec with options as a list": with_field(chain=[["zstd", []]]),
    "codec with a nested option": with_field(chain=[["zstd", {"a": {"b": 1}}]]),
    "codec with no option": with_field(chain=[["zstd", {"a": None}]]),
    "codec with an infinite option": with_field(chain=[["zstd", {"a": float("inf")}]]),
    "long chain": with_field(chain=[["zstd", {}]] * 9),
    "segments of another type": with_field(segments="k"),
    "short segment": with_field(segments=[["k"]]),
    "long segment": with_field(segments=[[*GOOD["segments"][0], 1]]),
    "too many segments": with_field(segments=GOOD["segments"] * 2049),
    "two of one name": with_field(segments=[GOOD["segments"][0], ["k", "uint8", [3], "", -1, 4096, 3, 3, 5]]),
    "unknown dtype": segment(_1="object"),
    "dtype bytes in kv": segment(_1="bytes"),
    "shape as a number": segment(_2=3),
    "negative dimension": segment(_2=[-3]),
    "float dimension": segment(_2=[3.0]),
    "huge shape": segment(_2=[1 << 40, 1 << 40], _7=1 << 53),
    "huge empty shape": segment(_2=[0, 1 << 40, 1 << 40], _6=0, _7=0),
    "17 dimensions": segment(_2=[1] * 16 + [3]),
    "axes of another rank": segment(_3="LT"),
    "first token of another type": segment(_4="0"),
    "first token below -1": segment(_4=-2),
    "unaligned offset": segment(_5=1),
    "offset elsewhere": segment(_5=4096),
    "stored differs from raw": segment(_6=4),
    "stored nothing": segment(_6=0),
    "raw differs from the shape": segment(_7=4),
    "no checksum": segment(_8=None),
    "negative checksum": segment(_8=-1),
    "tokens true": with_field(tokens=True),
    "tokens negative": with_field(tokens=-1),
    "created as a number": with_field(created=1),
    "created nan": with_field(created=float("nan")),
    "expires infinite": with_field(expires=float("inf")),
    "lossy as a number": with_field(lossy=0),
    "tensor with a name": with_field(kind="tensor"),
    "bytes with a dtype": with_field(kind="bytes", segments=[["", "uint8", [3], "", -1, 0, 3, 3, 5]]),
}


def test_the_good_header_is_good():
    assert peek(front(header=msgpack.packb(GOOD), payload=4096)).key == "k"


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
def test_headers_with_a_right_checksum_and_a_wrong_content(fields):
    with pytest.raises(CorruptChunkError):
        peek(front(header=msgpack.packb(fields), payload=4096))


def test_headers_that_are_no_proper_msgpack():
    good = msgpack.packb(GOOD)
    twice = b"\x8c" + good[1:] + msgpack.packb("key") + msgpack.packb("other")
    bad = [
        b"",
        good[:-1],
        good + b"\x00",
        twice,
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 4000,  # nesting
        b"\x81\x90\x01",  # a list as a key
        b"\x81\x01\x01",  # a number as a key
        msgpack.packb(msgpack.ExtType(4, b"x")),
        msgpack.packb(with_field(created=msgpack.Timestamp(1, 1))),
        good.replace(b"kv", b"\xff\xfe"),
    ]
    for header in bad:
        with pytest.raises(CorruptChunkError):
            peek(front(header=header, payload=4096))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.sampled_from([*GOOD, "segments", "chain"]),
)
def test_any_value_in_any_field(value, field):
    with contextlib.suppress(CodecError):
        peek(front(header=msgpack.packb(with_field(**{field: value})), payload=4096))

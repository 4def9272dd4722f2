"""The encoding can be read back, so two values never share one."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.keys.wire import digest, encode

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.binary(max_size=9)
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
)


def read(data):
    tag, size = data[:1], struct.unpack("<I", data[1:5])[0]
    payload, rest = data[5 : 5 + size], data[5 + size :]
    assert len(payload) == size
    simple = {
        b"N": lambda: None,
        b"?": lambda: payload == b"\x01",
        b"i": lambda: int(payload),
        b"f": lambda: struct.unpack("<d", payload)[0],
        b"s": lambda: payload.decode("utf-8"),
        b"b": lambda: payload,
    }
    if tag in simple:
        return simple[tag](), rest
    items = []
    while payload:
        item, payload = read(payload)
        items.append(item)
    return (items if tag == b"l" else dict(zip(items[::2], items[1::2], strict=True))), rest


def typed(value):
    """Make values comparable with their types: 1, 1.0 and True differ, 0.0 and -0.0 too."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return type(value).__name__, repr(value)


@settings(deadline=None)
@given(values)
def test_an_encoding_says_type_and_value(reference, value):
    back, rest = read(encode(value))
    assert rest == b""
    assert typed(back) == typed(value)
    assert encode(value) == reference.pack(value)


def test_the_order_of_a_mapping_does_not_count():
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})
    assert encode([1, 2]) != encode([2, 1])


def test_labels_and_fields_stay_apart():
    assert digest("a", "bc") != digest("ab", "c")
    assert digest("a", "b", "c") != digest("a", ["b", "c"])


@pytest.mark.parametrize("value", [object(), {1, 2}, [object()]])
def test_what_has_no_fixed_text_is_refused(value):
    with pytest.raises(TypeError, match="no encoding for"):
        encode(value)

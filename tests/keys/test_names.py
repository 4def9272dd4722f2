"""Names on media: injective, never a path, reversible for KV keys; which texts are keys."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InvalidKeyError
from kvtier.keys import Prefix, check_key, chunk_keys, key_of, name_of
from kvtier.keys.names import name_prefixes

AWKWARD = [
    "a/b", "a-SEP-b", "a_b", "a%2Fb", "A/b", "a/B", "a/", "a//b", "./a", "../a", "/etc/x", "..", "a\n", "a", "a ", "a.",
    "CON", "\U0001f600", unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"), "k" * 300, "k" * 1024,
    "F" * 16 + "/" + "0" * 16 + "/" + "0" * 32, "0" * 16 + "/" + "F" * 16 + "/" + "0" * 32,
    "x-" + "0" * 40, "0" * 16 + "." + "0" * 16 + "." + "0" * 32, "0" * 16 + "/" + "0" * 16 + "/" + "0" * 32 + "\n",
    "0" * 16 + "/" + "0" * 16 + "/" + "0" * 32, "0" * 16 + "/" + "0" * 16 + "/" + "F" * 32,
    "\u0660" * 16 + "/" + "0" * 16 + "/" + "0" * 32,
]  # fmt: skip


def test_awkward_keys_have_names_of_their_own():
    names = [name_of(check_key(key)) for key in AWKWARD]
    assert len({name.casefold() for name in names}) == len(AWKWARD)
    assert all(re.fullmatch(r"[0-9a-z.-]{1,120}", name) and not name.startswith(".") for name in names)


def test_kv_keys_map_back(space):
    keys = chunk_keys(Prefix(range(9), salt="s"), namespace=space, chunk_tokens=4)
    for key in (*keys.keys, keys.partial):
        assert key_of(name_of(key)) == key
        assert name_of(key) == key.replace("/", ".")


@pytest.mark.parametrize("key", [key for key in AWKWARD if key != "0" * 16 + "/" + "0" * 16 + "/" + "0" * 32])
def test_other_names_do_not_map_back(key):
    assert key_of(name_of(key)) is None


@pytest.mark.parametrize("name", ["", "..", "x-", "0" * 16 + "." + "0" * 16 + "." + "0" * 32 + "\n", "tmp.1.2"])
def test_what_is_no_name_has_no_key(name):
    assert key_of(name) is None


@settings(deadline=None)
@given(st.text(min_size=1), st.text(min_size=1))
def test_names_differ_where_keys_do(one, other):
    assert (name_of(one) == name_of(other)) == (one == other)


@pytest.mark.parametrize(
    "key",
    ["", "k" * 1025, "k" * 10_000, "a\0b", "\ud800", "a\udfffb", b"a", None, 5, ("a",)],
    ids=lambda key: repr(key)[:20],
)
def test_what_is_no_key(key):
    with pytest.raises(InvalidKeyError, match="key"):
        check_key(key)


def test_a_lone_surrogate_still_has_a_name():
    """`name_of` is asked about keys read back from media, so it must not raise."""
    assert name_of("\ud800") != name_of("\udfff")


def test_name_prefixes_cover_every_key_under_a_prefix():
    kv = f"{'0123456789abcdef'}/{'1' * 16}/{'2' * 32}"
    for text in (kv, "0123456789abcdef/else", "abc", "a[1]", "ÄÖ"):
        for end in range(len(text) + 1):
            assert name_of(text).startswith(name_prefixes(text[:end]))
    assert name_prefixes("") == ("",)
    assert name_prefixes("0123456789abcdef/1") == ("0123456789abcdef.1", "x-")
    assert name_prefixes("a*") == ("x-",)

"""Sizes in human units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import format_size, parse_size
from kvtier.config.sizes import MAX_SIZE


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("4GiB", 4_294_967_296),
        ("4 GiB", 4_294_967_296),
        (" 4gib ", 4_294_967_296),
        ("10GB", 10_000_000_000),
        ("10 GB", 10_000_000_000),
        ("1.5KiB", 1536),
        ("0.5 MB", 500_000),
        ("1TiB", 1_099_511_627_776),
        ("2tb", 2_000_000_000_000),
        ("1kb", 1000),
        (MAX_SIZE, MAX_SIZE),
    ],
)
def test_sizes_mean_what_is_documented(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (0, "at least 1 byte"),
        (-1, "at least 1 byte"),
        ("0GiB", "at least 1 byte"),
        ("0.1B", "not a whole number of bytes"),
        ("0.0001 KiB", "at least 1 byte"),
        ("-4GiB", "is not a size"),
        (True, "is not a size"),
        (False, "is not a size"),
        (4.0, "is not a size"),
        (None, "is not a size"),
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("4 gigs", "no unit"),
        ("4G", "write 4GiB"),
        ("4 Gi", "no unit"),
        ("1e3", "is not a size"),
        ("1_000", "is not a size"),
        ("4GiB4GiB", "is not a size"),
        ("٤GiB", "is not a size"),
        (MAX_SIZE + 1, "write a smaller size"),
        ("9000000 TiB", "write a smaller size"),
        ([1], "is not a size"),
    ],
)
def test_everything_else_is_refused_with_a_way_out(text, words):
    with pytest.raises(ValueError, match=words):
        parse_size(text)


@given(
    st.integers(1, MAX_SIZE)
    | st.builds(lambda n, shift: n << shift, st.integers(1, 999), st.sampled_from([10, 20, 30, 40]))
)
def test_what_is_shown_means_the_same_size(size):
    assert parse_size(format_size(size)) == size


def test_the_largest_exact_unit_is_shown():
    assert [format_size(n) for n in (1000, 1024, 1536, 4 << 30, 3 << 40)] == ["1000B", "1KiB", "1536B", "4GiB", "3TiB"]

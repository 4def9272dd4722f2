"""Names, directories and moments, checked against other sources."""

import binascii
from collections import Counter
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.disk_layout import SHARDS, expiry_of, mtime_of, shard_of, shard_path


def test_no_directory_gets_many_names():
    counts = Counter(shard_of(f"0123456789abcdef.0000000000000000.{i:032x}") for i in range(1_000_000))
    assert len(counts) == SHARDS == 1024
    assert max(counts.values()) < 1_300  # of 10,000 allowed
    paths = {shard_path(shard) for shard in range(SHARDS)}
    assert len(paths) == SHARDS
    assert max(Counter(parent for parent, _ in paths).values()) == 32


def test_shard_is_the_crc_of_the_name():
    assert shard_of("123456789") == 0xCBF43926 % 1024  # the check value of CRC-32
    assert shard_of("x-0") == binascii.crc32(b"x-0") % 1024
    assert shard_path(0) == ("00", "00")
    assert shard_path(1023) == ("1f", "1f")
    assert shard_path(37) == ("01", "05")


@given(st.floats(min_value=1e-6, max_value=13e9))
def test_expiry_round_trips(expires):
    known = expiry_of(mtime_of(expires))
    assert known is not None
    assert abs(known - expires) <= 1e-9
    if expires >= 1e9:
        assert known == expires


def test_expiry_is_the_moment():
    moment = datetime(2031, 5, 6, 7, 8, 9, 500_000, tzinfo=UTC)
    assert mtime_of(moment.timestamp()) == 1_935_990_489_500_000_000 + (int(moment.timestamp()) - 1_935_990_489) * 10**9
    assert mtime_of(None) == 0
    assert expiry_of(0) is None
    assert expiry_of(-5) is None

"""What members of the redis backend's index tell, one by one and in long replies."""

import pytest

from kvtier.backends.base import Stat
from kvtier.backends.redis_members import Members, stats_of
from kvtier.errors import BackendError
from kvtier.testing.servers.redis_tiers import new_prefix, opened_redis

SHAPE = "0123456789abcdef.16384.2097152"


def test_columns_are_those_of_each_member():
    lines = "\n".join(f"{name} {size} {due} 17.25 {SHAPE}" for name, size, due in [("a", 1, 0), ("b", 2, 9000)])
    assert stats_of(lines) == [Stat("a", 1, None, 17.25), Stat("b", 2, 9.0, 17.25)]
    assert stats_of(lines, now=8999) == stats_of(lines)
    assert stats_of(lines, now=9000) == [Stat("a", 1, None, 17.25)]
    assert stats_of("") == []


def test_what_stands_before_each_member_is_left_out():
    page = Members(2, f"$50\r\na 1 0 1.5 {SHAPE}\r\n$50\r\nb 7 5000 2.5 {SHAPE}\r\n", now=0, spare=1)
    assert page.stats() == [Stat("a", 1, None, 1.5), Stat("b", 7, 5.0, 2.5)]
    assert page.behind == "[b!"


@pytest.mark.parametrize("line", ["a", f"a 1 0 1.5 {SHAPE} more", f"a x 0 1 {SHAPE}", f"a 1 x 1 {SHAPE}", "a 1 0 x y"])
def test_other_lines_are_a_fault(line):
    with pytest.raises(BackendError, match="something else"):
        stats_of(line)


@pytest.mark.redis
@pytest.mark.parametrize("limit", [7, 400, 2500])
@pytest.mark.parametrize("client", ["wire", "redis-py"])
async def test_replies_longer_than_usual(either_server, monkeypatch, limit, client):
    """Members with the longest names there are, in several stretches of several pages, in one page, and in less."""
    monkeypatch.setattr("kvtier.backends.redis_listing.PAGE_ENTRIES", limit)
    monkeypatch.setattr("kvtier.backends.redis_wire._WORD_BYTES", 16)  # so that the memory for a reply has to grow
    names = [f"{number:03}{'n' * 117}" for number in range(400)]
    async with opened_redis(either_server.url, prefix=new_prefix(), client=client) as subject:
        await subject.put_all(dict.fromkeys(names, b"x"))
        pages = [page async for page in subject.backend.scan_under("")]
        assert [stat.name for page in pages for stat in page] == names
        assert max(map(len, pages)) == min(limit, 400)
        under = [stat.name async for page in subject.backend.scan_under("1") for stat in page]
        assert under == [name for name in names if name.startswith("1")]


@pytest.mark.redis
async def test_an_index_that_is_none_is_a_fault_and_the_connection_is_not_used_again(either_server):
    prefix = new_prefix()
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        either_server.call("SET", f"{prefix}:{{00}}:index", "no index")
        for _ in range(2):
            with pytest.raises(BackendError, match="WRONGTYPE"):
                _ = [page async for page in subject.backend.scan_under("")]
        either_server.call("UNLINK", f"{prefix}:{{00}}:index")
        await subject.put("a", b"x")
        assert [stat.name async for page in subject.backend.scan_under("") for stat in page] == ["a"]

"""`kvtier verify` finds every kind of damage and drops it when told to; `kvtier gc` removes what is over."""

import os

import pytest
import xxhash

KEYS = ("one", "two", "three", "four")


@pytest.fixture
def filled(kvtier, on_disk, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(5000))
    for key in KEYS:
        kvtier("put", key, "file")
    return on_disk


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_all_right(kvtier, filled):
    (found,) = kvtier("verify", "--json").json
    assert (found["sound"], found["sound_bytes"], found["clean"]) == (4, 4 * 12288, True)
    said = kvtier("verify")
    assert said.status == 0
    assert "4 entries are right" in said.out


def shorten(path):
    path.write_bytes(path.read_bytes()[:-4096])


def lengthen(path):
    path.write_bytes(path.read_bytes() + bytes(4096))


def swap(path):
    other = next(each for each in path.parents[2].glob("*/*/*") if each != path)
    path.write_bytes(other.read_bytes())


def blank(path):
    path.write_bytes(bytes(12288))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: flip(path, 50),
        lambda path: flip(path, 5000),
        lambda path: flip(path, 12287),
        shorten,
        lengthen,
        swap,
        blank,
        empty,
    ],
    ids=["header", "payload", "padding", "short", "long", "another key's", "zeros", "empty"],
)
def test_damage_is_found_and_dropped(kvtier, filled, stored_files, spoil):
    victim = stored_files()[1]
    spoil(victim)
    os.utime(victim, ns=(0, 0))  # a medium that spoils bytes does not set an expiry
    said = kvtier("verify", "--json")
    assert said.status == 1
    assert list(said.json[0]["bad"]) == [victim.name]
    assert "--repair" in kvtier("verify").out
    assert victim.exists(), "nobody asked for a repair"
    repaired = kvtier("verify", "--repair", "--json")
    assert (repaired.status, repaired.json[0]["dropped"]) == (0, 1)
    assert not victim.exists()
    assert kvtier("verify", "--json").json[0]["sound"] == 3


def test_entries_of_a_later_format_are_kept(kvtier, filled, stored_files):
    victim = stored_files()[0]
    content = bytearray(victim.read_bytes())
    content[8] = 9  # the format's number
    front = int.from_bytes(content[16:24], "little")
    content[32:40] = xxhash.xxh3_64_intdigest(bytes(content[:32] + content[40:front])).to_bytes(8, "little")
    victim.write_bytes(content)
    os.utime(victim, ns=(0, 0))
    said = kvtier("verify", "--repair", "--json")
    assert said.status == 1
    assert (list(said.json[0]["foreign"]), said.json[0]["bad"]) == ([victim.name], {})
    assert victim.exists()


def test_a_tier_by_name(kvtier, filled):
    assert [found["tier"] for found in kvtier("verify", "--tier", "local-disk", "--json").json] == ["local-disk"]


def test_gc_removes_what_is_expired(kvtier, filled, stored_files):
    os.utime(stored_files()[0], (1, 1))  # expired in 1970
    assert kvtier("gc", "--dry-run", "--json").json["local-disk"]["expired"] == 1
    assert len(stored_files()) == 4
    assert kvtier("gc", "--json").json["local-disk"]["removed_bytes"] == 12288
    assert len(stored_files()) == 3


def test_gc_removes_what_is_over_the_capacity(kvtier, filled, stored_files, write_config):
    write_config(f'[[tiers]]\nbackend = "local-disk"\npath = "{filled}"\ncapacity = "30KiB"')
    said = kvtier("gc")
    assert (said.status, "over: 2" in said.out) == (0, True)
    assert len(stored_files()) == 2

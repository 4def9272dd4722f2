"""Case 15: keys that look like paths, like each other, or like nothing at all; nothing happens outside the root."""

import unicodedata

import pytest

from kvtier.errors import ConfigError, InvalidKeyError
from kvtier.store import open_chunks

WORD = "é\u0301ﬁ\u00c5"
ACCEPTED = [
    *["a/b", "a-SEP-b", "a_b", "a%2Fb", "A/b", "a/B", "a/", "a//b", "./a", "../a", "/etc/x", "..", ".", "/", "a", "A"],
    *["a\\b", "~", "~/a", "$HOME", "*", "a?b", "-rf", "x-" + "0" * 40, "lock", "kvtier-format", "../../journal/x"],
    *[unicodedata.normalize(form, WORD) for form in ("NFC", "NFD", "NFKC", "NFKD")],
    *["k" * 300, "k" * 301, "k" * 1024, "\u540d" * 1024, "🎈" * 1024],
    *[
        "line\nline",
        "\n",
        "\r",
        "\t",
        " ",
        "a ",
        " a",
        "a.",
        "CON",
        "con",
        "NUL.txt",
        "🎈",
        "\x7f",
        "\x1b[0m",
        "\ufeffa",
    ],
    *["0123456789abcdef/fedcba9876543210/00112233445566778899aabbccddeeff"],  # what keys of KV look like
    *["0123456789abcdef.fedcba9876543210.00112233445566778899aabbccddeeff"],  # and the name they are stored under
    *["0123456789ABCDEF/fedcba9876543210/00112233445566778899aabbccddeeff"],
]
REJECTED = ["", "a\x00b", "\x00", "\ud800", "a\udfffb", "k" * 1025, "k" * 10_000, b"a", 1, None, ("a",)]
TIERS = ["memory", "disk", "memory and disk"]


def value_of(key):
    return f"the value of {ACCEPTED.index(key)}".encode()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The disk tier's root, three directories down; the process stands beside it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "work"))
    return tmp_path / "one" / "two" / "root"


def config_of(shape, root):
    memory = {"backend": "pinned-cpu", "capacity": "16MiB"}
    disk = {"backend": "local-disk", "path": str(root), "capacity": "64MiB"}
    tiers = {"memory": [memory], "disk": [disk], "memory and disk": [memory, disk]}[shape]
    return {"deadline_seconds": 60, "memory": {"staging_bytes": "4MiB"}, "tiers": tiers}


def outside(tmp_path, root):
    """Every path beside the root, with what can be told of it."""
    paths = [path for path in tmp_path.rglob("*") if root not in (path, *path.parents)]
    return {path: (path.is_dir(), path.is_symlink(), None if path.is_dir() else path.read_bytes()) for path in paths}


@pytest.fixture(params=TIERS)
def config(request, root):
    return config_of(request.param, root)


def test_the_accepted_keys_are_all_different():
    assert len(set(ACCEPTED)) >= len(ACCEPTED) - 2  # some normal forms of one word are one text
    assert len({key.casefold() for key in ACCEPTED}) < len(set(ACCEPTED))


async def test_every_accepted_key_has_its_own_value_and_is_listed_verbatim(config, tmp_path, root):
    (tmp_path / "a").write_bytes(b"not to be touched")
    (root.parent).mkdir(parents=True)
    (root.parent / "a").write_bytes(b"not to be touched either")
    before = outside(tmp_path, root)
    async with open_chunks(config) as store:
        for key in ACCEPTED:
            await store.put(key, value_of(key))
        await store.flush()
        for key in ACCEPTED:
            assert await store.get(key) == value_of(key)
            assert await store.exists(key) is True
        listed = [entry.key async for entry in store.list()]
        assert sorted(listed) == sorted(set(ACCEPTED))
        for prefix in ("a/", "..", "k", " "):
            listed = [entry.key async for entry in store.list(prefix)]
            assert sorted(listed) == sorted({key for key in ACCEPTED if key.startswith(prefix)})
        gone = ACCEPTED[::3]
        await store.delete_many(gone)
        for key in ACCEPTED:
            assert await store.get(key) == (None if key in gone else value_of(key))
    assert outside(tmp_path, root) == before


@pytest.mark.parametrize("journal", ["journal", "no journal"])
async def test_the_next_process_lists_them_verbatim_too(journal, root):
    """Without a journal, hashed names say nothing: the key is written inside the entry."""
    config = config_of("disk", root)
    async with open_chunks(config) as store:
        await store.put_many({key: value_of(key) for key in ACCEPTED}, wait="durable")
    if journal == "no journal":
        for log in (root / "journal").iterdir():
            log.unlink()
    async with open_chunks(config) as store:
        assert sorted([entry.key async for entry in store.list()]) == sorted(set(ACCEPTED))
        assert await store.get_many(ACCEPTED) == [value_of(key) for key in ACCEPTED]


@pytest.mark.parametrize("key", REJECTED, ids=lambda key: repr(key)[:20])
async def test_a_rejected_key_is_rejected_by_every_call_alike(config, key, tmp_path, root):
    async with open_chunks(config) as store:
        await store.put("good", b"1")
        await store.flush()
        before = outside(tmp_path, root)
        for call in (store.put(key, b"0"), store.get(key), store.exists(key), store.delete(key)):
            with pytest.raises(InvalidKeyError):
                await call
        for batch, answers in ((store.get_many, [b"1", None]), (store.exists_many, [True, False])):
            assert await batch(["good", key]) == answers  # one bad key never fails a batch
        assert await store.delete_many([key, "absent"]) == [False, False]
        results = await store.put_many({"better": b"2", key: b"0"})
        assert isinstance(results[key], InvalidKeyError)
        assert await store.get_many(["good", "better"]) == [b"1", b"2"]
        assert sorted([entry.key async for entry in store.list()]) == ["better", "good"]
        assert outside(tmp_path, root) == before


def files(root):
    return {path for path in (root / "entries").rglob("*") if not path.is_dir()}


@pytest.fixture
async def place(root):
    """Where the key "next" will be: learnt by putting it once, and free again."""
    async with open_chunks(config_of("disk", root)) as store:
        await store.put("next", b"first", wait="durable")
        (place,) = files(root)
        await store.delete("next")
    assert not place.exists()
    return place


@pytest.mark.parametrize("target", ["file", "nothing", "directory"])
@pytest.mark.parametrize("opened", ["before", "after"])
async def test_a_link_in_the_place_of_a_key_leads_nowhere(tmp_path, root, place, target, opened):
    away = tmp_path / "away"
    away.mkdir()
    (away / "file").write_bytes(b"precious")
    to = {"file": away / "file", "nothing": away / "nothing", "directory": away}[target]
    before = outside(tmp_path, root)

    def plant():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(to)

    if opened == "after":
        plant()
    async with open_chunks(config_of("disk", root)) as store:
        if opened == "before":
            plant()
        assert await store.get("next") is None
        assert await store.exists("next") is False
        assert [entry.key async for entry in store.list()] == []
        assert await store.delete("next") is False
        await store.put("next", b"second", wait="durable")
        assert await store.get("next") == b"second"
        assert not place.is_symlink(), "the value went where the link leads"
        assert await store.delete("next") is True
        assert outside(tmp_path, root) == before


async def test_an_entry_that_becomes_a_link_is_read_from_nowhere_else(tmp_path, root):
    """What the link leads to is the very entry, whole: it is outside all the same."""
    async with open_chunks(config_of("disk", root)) as store:
        await store.put("next", b"first", wait="durable")
        (place,) = files(root)
        place.rename(tmp_path / "moved")
        place.symlink_to(tmp_path / "moved")
        before = outside(tmp_path, root)
        assert await store.get("next") is None
        assert await store.exists("next") is False
        await store.put("next", b"second", wait="durable")
        assert await store.get("next") == b"second"
        assert outside(tmp_path, root) == before


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_a_link_in_the_place_of_a_directory_leads_nowhere(tmp_path, root, place, level):
    """Any directory above the key's file, up to the one of all entries, leads outside: there nothing is written."""
    away = tmp_path / "away"
    below = [place.name, place.parent.name, place.parent.parent.name][: level + 1]
    (away.joinpath(*below[:0:-1])).mkdir(parents=True)
    away.joinpath(*below[::-1]).write_bytes(b"precious")
    link = place.parents[level]
    for path in sorted(link.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if link.exists():
        link.rmdir()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(away)
    assert place.read_bytes() == b"precious", "the test itself must find it"
    before = outside(tmp_path, root)
    async with open_chunks(config_of("memory and disk", root)) as store:
        assert await store.get("next") is None
        assert await store.exists("next") is False
        assert await store.delete("next") is False
        await store.put("next", b"second")
        result = await store.flush()
        assert result.tiers["local-disk"].failed == 1
        assert store.stats().tiers["local-disk"].write_errors >= 1
        assert await store.get("next") == b"second"  # from memory
        await store.delete("next")
    assert outside(tmp_path, root) == before


@pytest.mark.parametrize("what", ["owners", "journal", "owners/1-0123456789abcdef", "journal/1-0123456789abcdef"])
async def test_links_in_the_place_of_the_stores_own_directories_lead_nowhere(tmp_path, root, place, what):
    away = tmp_path / "away"
    (away / "1-0123456789abcdef").mkdir(parents=True)
    for name in ("lock", "x.tmp", "log", "1-0123456789abcdef/x.tmp", "1-0123456789abcdef/lock"):
        (away / name).write_bytes(b"precious")
    link = root / what
    for path in sorted(link.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if link.exists():
        link.rmdir()
    link.symlink_to(away)
    before = outside(tmp_path, root)
    config = config_of("memory and disk", root)
    config["tiers"][1]["required"] = False
    try:
        async with open_chunks(config) as store:
            await store.put("next", b"second")
            await store.flush()
            assert await store.get("next") == b"second"
    except ConfigError:  # a root that cannot be used is told at open
        assert what == "owners"
    assert outside(tmp_path, root) == before

"""`kvtier migrate` on real directories: right, verified, never over what is newer, and resumable after a kill."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import kvtier as library
from kvtier.backends.local_disk import LocalDiskBackend

LAYOUT = library.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
NAMESPACE = '[namespace]\nmodel = "org/name"\nrevision = "1"\n'


def tier(name, path, options=""):
    return f'[[tiers]]\nbackend = "local-disk"\nname = "{name}"\npath = "{path}"\ncapacity = "1GiB"\n{options}\n'


@pytest.fixture
def two_disks(write_config, tmp_path):
    """Return the folders of tiers `old` and `new`, and write a config with both; options go to `new`."""

    def write(options="", extra=""):
        write_config(extra + NAMESPACE + tier("old", tmp_path / "old-kv") + tier("new", tmp_path / "new-kv", options))
        return tmp_path / "old-kv", tmp_path / "new-kv"

    return write


def files(folder):
    return sorted((folder / "entries").glob("*/*/*"), key=lambda path: path.name)


@pytest.fixture
def fill(tmp_path):
    """Put blobs into one tier; return what was put."""

    def put(*keys, tier="old", ttl=None):
        contents = {key: os.urandom(5000) for key in keys}
        asyncio.run(put_all(tier_config(tier, tmp_path / f"{tier}-kv"), contents, ttl_seconds=ttl))
        return contents

    return put


def tier_config(name, path):
    return {"tiers": [{"backend": "local-disk", "name": name, "path": str(path), "capacity": "1GiB"}]}


async def put_all(config, contents, *, ttl_seconds=None):
    async with library.open_chunks(config) as chunks:
        for key, content in contents.items():
            await chunks.put(key, content, wait="durable", ttl_seconds=ttl_seconds)


async def get_all(config, keys):
    async with library.open_chunks(config) as chunks:
        return {key: await chunks.get(key) for key in keys}


def at_target(tmp_path, *keys):
    return asyncio.run(get_all(tier_config("new", tmp_path / "new-kv"), keys))


def test_everything_is_copied_once(kvtier, two_disks, fill, tmp_path):
    old, new = two_disks()
    contents = fill("a/1", "a/2", "b/3")
    said = kvtier("migrate", "old", "new", "--json")
    assert said.status == 0
    assert (said.json["copied"], said.json["present"], said.json["complete"]) == (3, 0, True)
    assert said.json["copied_bytes"] == sum(path.stat().st_size for path in files(old))
    assert at_target(tmp_path, *contents) == contents
    before = [path.stat().st_mtime_ns for path in files(new)]
    again = kvtier("migrate", "old", "new", "--json").json
    assert (again["copied"], again["present"], again["copied_bytes"]) == (0, 3, 0)
    assert [path.stat().st_mtime_ns for path in files(new)] == before
    assert len(files(old)) == 3, "a copy takes nothing away"


def test_a_prefix_and_a_dry_run(kvtier, two_disks, fill):
    _, new = two_disks()
    fill("a/1", "a/2", "b/3")
    assert kvtier("migrate", "old", "new", "--prefix", "a/", "--dry-run", "--json").json["copied"] == 2
    assert not files(new)
    said = kvtier("migrate", "old", "new", "--prefix", "a/")
    assert "copied: 2" in said.out
    assert len(files(new)) == 2


def test_time_to_live_goes_along(kvtier, two_disks, fill):
    two_disks()
    fill("short", ttl=500)
    fill("endless")
    kvtier("migrate", "old", "new")
    expiry = {entry["key"]: entry["expires"] for entry in kvtier("ls", "--json", "--tier", "new").json}
    at_source = {entry["key"]: entry["expires"] for entry in kvtier("ls", "--json", "--tier", "old").json}
    assert expiry == at_source
    assert expiry["endless"] is None
    assert 0 < expiry["short"] - time.time() < 500


def test_the_targets_time_to_live_caps_it(kvtier, two_disks, fill):
    two_disks("ttl_seconds = 50.0")
    fill("endless")
    kvtier("migrate", "old", "new")
    (entry,) = kvtier("ls", "--json", "--tier", "new").json
    assert 0 < entry["expires"] - time.time() <= 50


def test_expired_entries_stay_behind(kvtier, two_disks, fill):
    old, _new = two_disks()
    fill("a", "b")
    os.utime(files(old)[0], (1, 1))
    said = kvtier("migrate", "old", "new", "--json")
    assert (said.status, said.json["expired"], said.json["copied"]) == (0, 1, 1)


def test_another_config(kvtier, two_disks, fill, tmp_path):
    two_disks()
    contents = fill("a")
    other = tmp_path / "other.toml"
    other.write_text(tier("cold", tmp_path / "cold"))
    assert kvtier("migrate", "old", "cold", "--to-config", other).status == 0
    assert kvtier("get", "a", "out", "--config", other).status == 0
    assert (tmp_path / "out").read_bytes() == contents["a"]


def test_what_is_newer_stays(kvtier, two_disks, fill, tmp_path):
    two_disks()
    fill("key", tier="old")
    newer = fill("key", tier="new")
    assert kvtier("migrate", "old", "new", "--json").json["present"] == 1
    assert kvtier("migrate", "old", "new", "--replace-older", "--json").json["newer"] == 1
    assert at_target(tmp_path, "key") == newer


def test_what_is_older_is_replaced_only_when_asked(kvtier, two_disks, fill, tmp_path):
    two_disks()
    older = fill("key", tier="new")
    newer = fill("key", tier="old")
    assert kvtier("migrate", "old", "new", "--json").json["present"] == 1
    assert at_target(tmp_path, "key") == older
    assert kvtier("migrate", "old", "new", "--replace-older", "--json").json["replaced"] == 1
    assert at_target(tmp_path, "key") == newer
    assert kvtier("migrate", "old", "new", "--replace-older", "--json").json["present"] == 1


def test_what_comes_while_it_runs_is_newer(kvtier, two_disks, fill, tmp_path, monkeypatch):
    _, new = two_disks()
    fill("key", tier="old")
    newer = fill("key", tier="new")
    stat_many, asked = LocalDiskBackend.stat_many, []

    async def blind(self, names):  # at the first look it was not there yet
        answers = await stat_many(self, names)
        asked.append(self.path)
        return [None] * len(answers) if self.path == new and asked.count(new) == 1 else answers

    monkeypatch.setattr(LocalDiskBackend, "stat_many", blind)
    assert kvtier("migrate", "old", "new", "--json").json["newer"] == 1
    monkeypatch.undo()
    assert at_target(tmp_path, "key") == newer


def test_damage_is_not_spread(kvtier, two_disks, fill, tmp_path):
    old, new = two_disks()
    fill("a", "b")
    victim = files(old)[0]
    content = bytearray(victim.read_bytes())
    content[5000] ^= 1
    victim.write_bytes(content)
    os.utime(victim, ns=(0, 0))
    said = kvtier("migrate", "old", "new", "--json")
    assert said.status == 1
    assert (said.json["bad"], said.json["copied"], said.json["complete"]) == (1, 1, False)
    assert "checksum" in said.json["wrong"][victim.name]
    assert victim.name not in {path.name for path in files(new)}


def test_a_medium_that_writes_something_else_is_noticed(kvtier, two_disks, fill, monkeypatch):
    _, new = two_disks()
    fill("a")
    write_many = LocalDiskBackend.write_many

    async def flip(self, writes):
        answers = await write_many(self, writes)
        for path in files(self.path):
            if self.path == new:
                content = bytearray(path.read_bytes())
                content[5000] ^= 1
                path.write_bytes(content)
                os.utime(path, ns=(0, 0))
        return answers

    monkeypatch.setattr(LocalDiskBackend, "write_many", flip)
    said = kvtier("migrate", "old", "new", "--json")
    assert (said.status, said.json["bad"], said.json["copied"]) == (1, 1, 0)
    assert not files(new), "what is wrong is taken away again"


def put_kv(path, tokens):
    kv = {name: torch.randn(2, len(tokens), 2, 8) for name in ("k", "v")}
    with library.open_blocking(path, layout=LAYOUT) as store:
        store.put(tokens, kv, wait="durable")
    return kv


def get_kv(path, tokens):
    with library.open_blocking(path, layout=LAYOUT) as store:
        return store.get(tokens)


@pytest.mark.parametrize(
    ("before", "after"),
    [("[]", '["zstd"]'), ('["zstd"]', "[]"), ('["int8"]', '["int8", "zstd"]'), ('["int8", "zstd"]', '["int8"]')],
)
def test_values_take_the_targets_form(kvtier, tmp_path, before, after):
    """The other form is what a store reads: bit-equal, or what the same lossy step gave at the source."""
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(NAMESPACE + tier("old", tmp_path / "one", f"codecs = {before}"))
    two.write_text(NAMESPACE + tier("new", tmp_path / "two", f"codecs = {after}"))
    tokens = list(range(512))
    put_kv(one, tokens)
    said = kvtier("migrate", "old", "new", "--config", one, "--to-config", two, "--json")
    assert (said.status, said.json["copied"]) == (0, 2)
    there, here = get_kv(two, tokens), get_kv(one, tokens)
    assert there.num_tokens == here.num_tokens == 512
    assert all(torch.equal(there.kv[name], here.kv[name]) for name in ("k", "v"))
    key = kvtier("ls", "--json", "--config", two).json[0]["key"]
    codecs = kvtier("stat", key, "--json", "--config", two).json["tiers"]["new"]["codecs"]
    assert [codec["name"] for codec in codecs] == [word.strip(' "') for word in after.strip("[]").split(",") if word]
    assert kvtier("verify", "--config", two).status == 0


def test_lossy_entries_do_not_get_into_a_lossless_config(kvtier, tmp_path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(NAMESPACE + tier("old", tmp_path / "one", 'codecs = ["int8"]'))
    two.write_text("lossless = true\n" + NAMESPACE + tier("new", tmp_path / "two"))
    put_kv(one, list(range(256)))
    said = kvtier("migrate", "old", "new", "--config", one, "--to-config", two, "--json")
    assert (said.status, said.json["refused"]) == (1, 1)
    assert not files(tmp_path / "two")


def test_a_full_target_stops_it_and_a_larger_one_goes_on(kvtier, two_disks, fill, tmp_path):
    _old, new = two_disks()
    fill("a", "b", "c")
    small, large = tmp_path / "small.toml", tmp_path / "large.toml"
    large.write_text(tier("new", new))
    small.write_text(large.read_text().replace("1GiB", "20KiB"))
    said = kvtier("migrate", "old", "new", "--to-config", small, "--in-flight", 1, "--json")
    assert said.status == 1
    assert (said.json["copied"], said.json["left"]) == (1, 2)
    assert said.json["stopped"]
    assert "run it again" in kvtier("migrate", "old", "new", "--to-config", small).out
    said = kvtier("migrate", "old", "new", "--to-config", large, "--json")
    assert (said.status, said.json["copied"], said.json["present"]) == (0, 2, 1)


@pytest.mark.parametrize("words", [("old", "old"), ("old", "nothing"), ("memory", "new")])
def test_mistakes(kvtier, two_disks, words, write_config):
    path = write_config("")
    two_disks()
    path.write_text(path.read_text() + '[[tiers]]\nbackend = "pinned-cpu"\nname = "memory"\ncapacity = "1MiB"\n')
    said = kvtier("migrate", *words)
    assert said.status == 2
    assert words[1] in said.err or words[0] in said.err


def start(*words, folder):
    command = [sys.executable, "-m", "kvtier", "migrate", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_it_goes_on_after_kill_9(kvtier, two_disks, tmp_path):
    old, new = two_disks()
    contents = {f"key {i}": os.urandom(2 << 20) for i in range(30)}
    asyncio.run(put_all(tier_config("old", old), contents, ttl_seconds=10_000))
    for copied in (3, 12):
        process = start("old", "new", "--in-flight", "1", folder=tmp_path)
        deadline = time.monotonic() + 200
        while len(files(new)) < copied and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
        assert copied <= len(files(new)) < 30
    there = len(files(new))
    said = kvtier("migrate", "old", "new", "--json")
    assert (said.status, said.json["present"], said.json["copied"]) == (0, there, 30 - there)
    assert asyncio.run(get_all(tier_config("new", new), contents)) == contents
    ends = [[path.stat().st_mtime for path in files(folder)] for folder in (old, new)]
    assert ends[0] == ends[1], "each has the life it had"
    assert kvtier("verify", "--json", "--tier", "new").json[0]["sound"] == 30

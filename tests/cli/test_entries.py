"""`kvtier ls`, `stat`, `rm`, `get`, `put` on a real directory."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch

import kvtier as library
from kvtier.backends.local_disk import LocalDiskBackend

LAYOUT = library.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")


@pytest.fixture
def filled(kvtier, on_disk, tmp_path):
    (tmp_path / "file").write_bytes(b"some bytes")
    for key in ("a/one", "a/two", "b/three"):
        assert kvtier("put", key, "file").status == 0
    return on_disk


async def put_kv(path):
    tokens = list(range(512))
    kv = {name: torch.randn(2, 512, 2, 8) for name in ("k", "v")}
    async with library.open(path, layout=LAYOUT) as store:
        await store.put(tokens, kv, wait="durable")
    return kv


def keys(said):
    return [entry["key"] for entry in said.json]


def test_put_and_get(kvtier, filled):
    assert kvtier("get", "a/one", "copy").status == 0
    assert (filled.parent / "copy").read_bytes() == b"some bytes"
    assert kvtier("get", "a/one", "-").out == "some bytes"


def test_ls(kvtier, filled):
    assert keys(kvtier("ls", "--json")) == ["a/one", "a/two", "b/three"]
    assert keys(kvtier("ls", "a/", "--json")) == ["a/one", "a/two"]
    assert keys(kvtier("ls", "--limit", 1, "--json")) == ["a/one"]
    assert "3 keys" in kvtier("ls").out
    assert "local-disk 8.192 kB; never expires" in kvtier("ls", "-l").out


def test_ttl(kvtier, filled):
    kvtier("put", "c", "file", "--ttl-seconds", 1000)
    (entry,) = kvtier("ls", "c", "--json").json
    assert entry["expires"] is not None


async def test_kv(kvtier, on_disk, tmp_path):
    await put_kv(tmp_path / "kvtier.toml")

    import threading  # the commands run a loop of their own

    said = []

    def ask():
        said.append(kvtier("ls", "--json"))
        said.append(kvtier("stat", keys(said[0])[0], "--json"))
        said.append(kvtier("get", keys(said[0])[0], "file"))
        said.append(kvtier("get", keys(said[0])[0], "file", "--container"))
        said.append(kvtier("ls"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    listed, stat, refused, got, plain = said
    assert len(listed.json) == 2
    facts = stat.json["tiers"]["local-disk"]
    assert (facts["kind"], facts["tokens"], len(facts["segments"])) == ("kv", 256, 2)
    assert refused.status == 2
    assert "--container" in refused.err
    assert got.status == 0
    assert (tmp_path / "file").stat().st_size == facts["bytes"]
    assert all(len(line) <= 80 for line in plain.out.splitlines())


def test_tensors_come_as_safetensors(kvtier, on_disk, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    values = {"a": torch.arange(5), "b": torch.randn(2, 3)}
    with library.open_blocking(tmp_path / "kvtier.toml", layout=LAYOUT) as store:
        store.chunks.put("tensors", values, wait="durable")
    assert kvtier("get", "tensors", "out.safetensors").status == 0
    loaded = safetensors.load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_stat_of_the_tiers(kvtier, filled):
    held = kvtier("stat", "--json").json
    assert list(held) == ["local-disk"]
    assert (held["local-disk"]["entries"], held["local-disk"]["bytes"]) == (3, 3 * 8192)
    assert "entries: 3" in kvtier("stat").out


def test_stat_of_a_key(kvtier, filled):
    said = kvtier("stat", "a/one")
    assert (said.status, "kind: bytes" in said.out) == (0, True)


def test_stat_tells_of_damage(kvtier, filled, stored_files):
    for path in stored_files():
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    said = kvtier("stat", "a/one", "--json")
    assert said.status == 1
    assert "checksum" in said.json["tiers"]["local-disk"]["damage"]


@pytest.mark.parametrize("words", [("stat", "x"), ("get", "x", "-"), ("rm", "x")])
def test_key_that_is_not_there(kvtier, filled, words):
    said = kvtier(*words)
    assert said.status == 1
    assert "x" in said.err


def test_rm(kvtier, filled):
    assert kvtier("rm", "a/one").status == 0
    assert keys(kvtier("ls", "--json")) == ["a/two", "b/three"]
    assert kvtier("rm", "--prefix", "a/", "--yes", "--json").json == {"deleted": 1, "absent": []}
    assert keys(kvtier("ls", "--json")) == ["b/three"]


def test_rm_asks_first(kvtier, filled, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    said = kvtier("rm", "--prefix", "")
    assert said.status == 1
    assert "delete 3 keys" in said.err
    assert len(keys(kvtier("ls", "--json"))) == 3


@pytest.mark.parametrize("words", [("rm",), ("rm", "a/one", "--prefix", "a")])
def test_rm_wants_one_of_both(kvtier, filled, words):
    assert kvtier(*words).status == 2


def test_tier_that_is_memory(kvtier, on_disk):
    said = kvtier("ls", "--tier", "pinned-cpu")
    assert said.status == 2
    assert "memory" in said.err


def test_tier_nobody_knows(kvtier, on_disk):
    said = kvtier("ls", "--tier", "local-dsk")
    assert said.status == 2
    assert "local-disk" in said.err


def test_medium_out_of_reach_is_a_problem_and_no_traceback(kvtier, write_config):
    write_config('[[tiers]]\nbackend = "redis"\nurl = "redis://127.0.0.1:1"\ncapacity = "1GiB"')
    for words in (("ls",), ("stat",), ("rm", "x"), ("verify",), ("gc",)):
        said = kvtier(*words)
        assert (said.status, "127.0.0.1:1" in said.err) == (1, True), words
        assert "Traceback" not in said.err


async def hang(*_):
    await asyncio.Event().wait()


@pytest.mark.parametrize("words", [("stat",), ("verify",), ("gc",), ("migrate", "local-disk", "other")])
def test_a_listing_that_stops_ends_by_its_deadline(kvtier, filled, tmp_path, monkeypatch, words):
    with (tmp_path / "kvtier.toml").open("a") as file:
        file.write('[[tiers]]\nbackend = "local-disk"\nname = "other"\npath = "other"\ncapacity = "1MiB"\n')

    async def scan(self, after=None):
        yield []
        await hang()

    monkeypatch.setattr(LocalDiskBackend, "scan", scan)
    said = kvtier(*words, "--deadline-seconds", 1.0)
    assert (said.status, "the listing stopped within 1 s" in said.text) == (1, True)


@pytest.mark.parametrize(
    ("words", "method", "told"),
    [
        (("verify",), "read_many", "stopped answering within 1 s, 0 of 3 entries"),
        (("stat", "a/one"), "stat_many", "did not answer within 1 s"),
        (("stat", "a/one"), "read_many", "did not answer within 1 s"),
        (("get", "a/one", "-"), "read_many", "was not read within 1 s"),
        (("gc",), "delete_many", "did not remove entries within 1 s"),
    ],
)
def test_a_medium_that_hangs_ends_by_the_deadline(kvtier, filled, stored_files, monkeypatch, words, method, told):
    if words == ("gc",):
        os.utime(stored_files()[0], (1, 1))  # something to remove
    monkeypatch.setattr(LocalDiskBackend, method, hang)
    said = kvtier(*words, "--deadline-seconds", 1.0)
    assert (said.status, told in said.text) == (1, True), said.text


def test_as_a_program(filled, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "ls"], capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 keys" in done.stdout


def test_shells_complete(tmp_path):
    asked = {"_KVTIER_COMPLETE": "complete_bash", "COMP_WORDS": "kvtier ver", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['kvtier']; from kvtier.cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | asked,
        check=False,
    )
    assert done.stdout.split() == ["verify"]

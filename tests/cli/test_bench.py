"""`kvtier bench` measures every tier, leaves what others stored alone and nothing of its own behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

import kvtier as library
from kvtier.store.kv import KVStore

SMALL = ("--model", "smollm2-135m", "--total", "2MiB")  # two chunks of 368 KiB each way
CONFIG = """
chunk_tokens = 16
[namespace]
model = "org/name"
revision = "1"
[[tiers]]
backend = "pinned-cpu"
capacity = "64GiB"
[[tiers]]
backend = "local-disk"
path = "{path}"
capacity = "{capacity}"
codecs = ["zstd"]
"""


@pytest.fixture
def bench(kvtier, write_config, tmp_path):
    def call(*words, capacity="1GiB", text=CONFIG):
        write_config(text.format(path=tmp_path / "kv", capacity=capacity))
        return kvtier("bench", *SMALL, *words)

    return call


def entries(tmp_path):
    return list((tmp_path / "kv" / "entries").glob("*/*/*"))


def test_every_tier_has_its_figures(bench, tmp_path):
    said = bench("--json").json
    assert (said["chunk_tokens"], said["chunk_bytes"]) == (16, 16 * 30 * 3 * 64 * 2 * 2)
    assert [tier["tier"] for tier in said["tiers"]] == ["pinned-cpu", "local-disk"]
    for tier in said["tiers"]:
        assert tier["problem"] == ""
        assert tier["chunks"] == 4
        assert 0 < tier["put_seconds"]["p50"] <= tier["put_seconds"]["max"]
        assert 0 < tier["get_seconds"]["p50"] <= tier["get_seconds"]["max"]
        assert min(tier["put_bytes_per_second"], tier["get_bytes_per_second"]) > 0
    memory, disk = said["tiers"]
    assert memory["stored_ratio"] == pytest.approx(1, rel=0.05)
    assert 0.6 < disk["stored_ratio"] < 0.95, "bf16 KV shrinks a little under zstd; constant values would vanish"
    assert not entries(tmp_path)


def test_the_table_fits(bench):
    said = bench("--tier", "local-disk")
    assert said.status == 0
    assert "local-disk" in said.out
    assert "pinned-cpu" not in said.out
    assert all(len(line.rstrip()) <= 80 for line in said.out.splitlines())


def test_what_others_stored_is_never_evicted_for_it(bench, kvtier, tmp_path):
    config = {"tiers": [{"backend": "local-disk", "path": str(tmp_path / "kv"), "capacity": "4MiB"}]}

    async def fill():
        async with library.open_chunks(config) as chunks:
            await chunks.put("mine", os.urandom(3 << 20), wait="durable")

    asyncio.run(fill())
    said = bench("--tier", "local-disk", capacity="4MiB")
    assert said.status == 1
    assert "--total" in said.out
    assert len(entries(tmp_path)) == 1
    assert kvtier("verify", "--json").json[0]["sound"] == 1


def test_wrong_values_are_noticed(bench, monkeypatch):
    get = KVStore.get

    async def wrong(self, *args, **options):
        hit = await get(self, *args, **options)
        hit.kv["k"][-1, -1, -1, -1] += 1
        return hit

    monkeypatch.setattr(KVStore, "get", wrong)
    said = bench("--tier", "pinned-cpu")
    assert said.status == 1
    assert "other values" in said.out


def test_a_medium_out_of_reach_is_said(bench):
    text = CONFIG + '[[tiers]]\nbackend = "redis"\nurl = "redis://127.0.0.1:1"\ncapacity = "1GiB"\n'
    said = bench("--json", text=text)
    assert said.status == 1
    assert "127.0.0.1:1" in said.json["tiers"][2]["problem"]
    assert said.json["tiers"][1]["chunks"] == 4, "the others are measured all the same"


@pytest.mark.parametrize("words", [("--tier", "nothing"), ("--total", "much"), ("--model", "unknown")])
def test_mistakes(bench, words):
    said = bench(*words)
    assert said.status == 2
    assert words[1] in said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_cleans_up(write_config, tmp_path, number):
    write_config(CONFIG.format(path=tmp_path / "kv", capacity="10GiB"))
    command = [
        sys.executable,
        "-m",
        "kvtier",
        "bench",
        "--model",
        "smollm2-135m",
        "--total",
        "4GiB",
        "-t",
        "local-disk",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while len(entries(tmp_path)) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert (process.returncode, "what was put is removed" in err) == (130, True), err
    assert "Traceback" not in err
    assert not entries(tmp_path)

"""Stores of several processes above one server: what one puts, deletes or clears, the others get or stop getting.

Run as a program with a port, a prefix and a number, this file is that many processes which put one prompt at once.
"""

import asyncio
import os
import subprocess
import sys

import pytest
import torch

import kvtier
from kvtier.testing.fault_proxy import FaultProxy
from kvtier.testing.servers.redis_tiers import new_prefix

pytestmark = pytest.mark.redis

LAYOUT = kvtier.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32")
CHUNK = 32
CHUNKS = 4
PROMPT = list(range(CHUNK * CHUNKS))
CHUNK_BYTES = 2 * 4 * CHUNK * 8 * 64 * 4
SHARED = kvtier.Namespace(model="org/model", revision="1")
LONGEST_SECONDS = 60.0


def kv():
    chosen = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, len(PROMPT), 8, 64, generator=chosen) for name in "kv"}


def store(port, prefix, *above, **options):
    tier = {"backend": "redis", "url": f"redis://127.0.0.1:{port}", "prefix": prefix, "capacity": "1GiB", **options}
    # By the usual rhythm of looking for news, and of asking again for what was absent, nothing would be heard here.
    config = {"chunk_tokens": CHUNK, "deadline_seconds": 60, "coherence_seconds": 3600, "tiers": [*above, tier]}
    return kvtier.open(config, namespace=SHARED, layout=LAYOUT)


def memory():
    return {"backend": "pinned-cpu", "capacity": "64MiB"}


async def until_gone(reader):
    async with asyncio.timeout(LONGEST_SECONDS):
        while await reader.get(PROMPT) is not None:
            await asyncio.sleep(0.05)


def disk(path):
    return {"backend": "local-disk", "path": str(path / "disk"), "capacity": "64MiB"}


async def test_what_one_puts_the_other_gets(either_server, tmp_path):
    prefix = new_prefix()
    async with (
        store(either_server.port, prefix, memory()) as one,
        store(either_server.port, prefix, memory(), disk(tmp_path), negative_seconds=0.001) as other,
    ):
        assert await other.get(PROMPT) is None
        await one.put(PROMPT, kv(), wait="redis")
        hit = await other.get(PROMPT)
        assert hit.num_tokens == len(PROMPT)
        assert all(torch.equal(hit.kv[name], kv()[name]) for name in "kv")


async def test_deletes_and_clears_reach_the_other(either_server):
    prefix = new_prefix()
    async with (
        store(either_server.port, prefix, memory()) as one,
        store(either_server.port, prefix, memory(), negative_seconds=0.001) as other,
    ):
        for forget in (lambda: one.delete(PROMPT), one.clear):
            await one.put(PROMPT, kv(), wait="redis")
            assert (await other.get(PROMPT)).num_tokens == len(PROMPT)
            await other.flush()
            await forget()
            await until_gone(other)
            assert await one.get(PROMPT) is None
            await asyncio.sleep(0.01)  # puts and deletes are told apart by the wall clock


async def test_lists_are_by_literal_prefix_and_see_what_others_put(valkey):
    tier = {"backend": "redis", "url": valkey.url, "prefix": new_prefix(), "capacity": "1GiB"}
    keys = ["a[1]:x", "a1:x", "a*", "ab", "a", "0123456789abcdef/odd", f"{'0' * 16}/{'1' * 16}/{'2' * 32}"]
    async with kvtier.open_chunks({"tiers": [tier]}) as one, kvtier.open_chunks({"tiers": [tier]}) as other:
        for key in keys:
            await one.put(key, b"x", wait="redis")
        for prefix in ("a[1]", "a*", "a", "", "0", "0000000000000000/", "0123456789abcdef/", "b"):
            listed = sorted([entry.key async for entry in other.list(prefix)])
            assert listed == sorted(key for key in keys if key.startswith(prefix))
        for key in keys:
            await one.delete(key)
        for prefix in ("a", "0000000000000000/", ""):
            assert [entry.key async for entry in other.list(prefix)] == []


async def test_a_wait_is_woken_by_the_put_of_another(either_server, monkeypatch):
    monkeypatch.setattr("kvtier.store.prefixes.LOOK_AGAIN_SECONDS", 3600)
    prefix = new_prefix()
    async with (
        store(either_server.port, prefix, memory()) as one,
        store(either_server.port, prefix, memory(), negative_seconds=3600) as other,
    ):
        assert await other.get(PROMPT) is None  # and would go on believing so
        waiting = asyncio.ensure_future(other.get(PROMPT, wait_seconds=LONGEST_SECONDS))
        channels = f"{prefix}:arrivals"
        async with asyncio.timeout(LONGEST_SECONDS):
            while ":1\r\n" not in either_server.call("PUBSUB", "NUMSUB", channels):
                await asyncio.sleep(0.01)
        await one.put(PROMPT, kv(), wait="redis")
        hit = await waiting
        assert hit is not None
        assert hit.num_tokens == len(PROMPT)
        async with asyncio.timeout(LONGEST_SECONDS):
            while ":0\r\n" not in either_server.call("PUBSUB", "NUMSUB", channels):
                await asyncio.sleep(0.01)


@pytest.mark.timeout(300)  # eight processes that import torch
def test_eight_processes_send_each_chunk_once(valkey):
    with FaultProxy(("127.0.0.1", valkey.port)) as proxy:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(proxy.port), new_prefix(), "8"]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        sent = proxy.request_bytes / CHUNK_BYTES
        assert CHUNKS <= sent < 2 * CHUNKS, f"{CHUNKS} chunks were sent, in all, {sent:.1f} times"


async def put_and_get(port, prefix, go):
    async with store(port, prefix, memory(), negative_seconds=0.001) as mine:
        assert await mine.get(PROMPT) is None
        os.write(go[0], b"!")
        await asyncio.to_thread(os.read, go[1], 1)
        await mine.put(PROMPT, kv(), wait="redis")
    async with store(port, prefix, negative_seconds=0.001) as mine:  # nothing above: from the server
        hit = await mine.get(PROMPT)
        assert hit.num_tokens == len(PROMPT)
        assert all(torch.equal(hit.kv[name], kv()[name]) for name in "kv")


def be_processes(port, prefix, count):
    ready, go = os.pipe(), os.pipe()
    torch.set_num_threads(1)
    children = []
    for _ in range(count):
        child = os.fork()  # nothing here has started a thread yet
        if child == 0:
            asyncio.run(put_and_get(port, prefix, (ready[1], go[0])))
            os._exit(0)
        children.append(child)
    for _ in children:
        os.read(ready[0], 1)
    os.write(go[1], b"!" * count)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(be_processes(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

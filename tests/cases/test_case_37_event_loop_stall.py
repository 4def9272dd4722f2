"""Case 37: moving, encoding and listing must not stall the event loop.

How long the loop was kept is a matter of benchmarks; here the kinds of stall are ruled out: no blocking file, socket or
sleep call on the loop, and no payload byte touched by the loop's thread.
"""

import threading
import time

import pytest
import torch
from blockbuster import BlockingError, blockbuster_ctx

from kvtier.chunk import blob, container
from kvtier.codecs import zstd
from kvtier.store import open_chunks, placing

MIB = 1 << 20


def config(path):
    return {
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "24MiB", "on_full": "wait"},
            {"backend": "local-disk", "path": str(path), "capacity": "256MiB", "codecs": ["zstd"]},
        ],
    }


async def exercise(store):
    async with store:
        values = {f"key {i}": torch.randint(0, 255, (8 * MIB,), dtype=torch.uint8) for i in range(6)}
        await store.put_many(values)
        await store.flush(deadline_seconds=60)
        found = await store.get_many(list(values), deadline_seconds=60)
        assert all(torch.equal(value, values[key]) for key, value in zip(values, found, strict=True))
        assert len([entry async for entry in store.list()]) == len(values)
        await store.delete_many(list(values)[:3])


async def test_no_blocking_call_on_the_loop(tmp_path):
    store = open_chunks(config(tmp_path / "disk"))  # reads the config: plain code, before anything is served
    with blockbuster_ctx("kvtier"):
        await exercise(store)


async def test_a_blocking_call_would_be_found(tmp_path, monkeypatch):
    store = open_chunks(config(tmp_path / "disk"))
    monkeypatch.setattr(placing, "payload_size", lambda _: time.sleep(0.001))
    with blockbuster_ctx("kvtier"), pytest.raises(BlockingError):
        await exercise(store)


@pytest.fixture
def payload_threads(monkeypatch):
    """Note which threads copy, checksum, encode or decode."""
    threads = set()

    def watched(function):
        def watching(*args, **kwargs):
            threads.add(threading.get_ident())
            return function(*args, **kwargs)

        return watching

    monkeypatch.setattr(blob, "copy_in", watched(blob.copy_in))
    monkeypatch.setattr(container, "check_segment", watched(container.check_segment))
    monkeypatch.setattr(zstd.ZstdCodec, "encode", watched(zstd.ZstdCodec.encode))
    monkeypatch.setattr(zstd.ZstdCodec, "decode", watched(zstd.ZstdCodec.decode))
    return threads


async def test_no_payload_byte_is_touched_by_the_loops_thread(tmp_path, payload_threads):
    await exercise(open_chunks(config(tmp_path / "disk")))
    assert payload_threads
    assert threading.get_ident() not in payload_threads

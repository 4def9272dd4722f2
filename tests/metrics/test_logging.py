"""What a store logs while everything goes wrong: structured, rarely, and neither prompts nor secrets."""

import logging
import os
import traceback

import pytest
import torch

import kvtier
from kvtier.concurrency.clock import SystemClock
from kvtier.errors import ConfigError
from kvtier.events import LOG_EVERY_SECONDS, Events
from kvtier.testing.clock import FrozenClock
from kvtier.testing.servers.fixtures import program_of
from kvtier.testing.servers.redis_servers import RedisServer

LAYOUT = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
PASSWORD, SALT, ACCESS, SECRET = "hunter2hunter2", "the-tenants-salt", "AKIAPLANTEDPLANTED", "planted/secret+key"
LORA = "planted-adapter"
TOKENS = [90_000_000 + 7 * i for i in range(64)]  # numbers that stand nowhere else


class Raising:
    def on_event(self, event):
        raise RuntimeError(f"an observer that fails on {event.kind}")


def config(folder, redis_url):
    return {
        "chunk_tokens": 16,
        "namespace": {"model": "org/name", "revision": "1"},
        "close_seconds": 2.0,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "256KiB"},
            {"backend": "local-disk", "path": str(folder / "kv"), "capacity": "64MiB"},
            {"backend": "redis", "url": redis_url, "capacity": "64MiB", "deadline_seconds": 0.3, "required": False},
            {
                "backend": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:1", "capacity": "64MiB",
                "access_key": ACCESS, "secret_key": SECRET, "required": False, "deadline_seconds": 0.3,
            },
        ],
    }  # fmt: skip


def spoil(folder):
    for path in (folder / "kv" / "entries").glob("*/*/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))


def text_of(record):
    """Return all that a handler could write of a record."""
    return f"{record.getMessage()} {record.__dict__} {logging.Formatter().format(record)}"


@pytest.fixture
def everything(caplog):
    """All records of all loggers that a server would keep at INFO, and all of kvtier's own."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="kvtier")
    return caplog


def prompt(number):
    """Return a prompt that says something of everything that is nobody's business."""
    return kvtier.Prefix([number, *TOKENS[1:]], salt=SALT, lora=LORA)


async def use(store, number):
    prefix = prompt(number)
    await store.put(prefix, {name: torch.randn(2, 64, 2, 8) for name in ("k", "v")}, deadline_seconds=2.0)
    return await store.get(prefix, deadline_seconds=2.0)


async def test_neither_prompts_nor_secrets_whatever_breaks(tmp_path, server_folder, everything):
    server = RedisServer(program_of("valkey"), server_folder, options={"requirepass": PASSWORD})
    with server:
        url = f"redis://user:{PASSWORD}@127.0.0.1:{server.port}"  # a user it does not know: refused
        with pytest.raises(ConfigError) as refused:
            await kvtier.open(config(tmp_path, url), layout=LAYOUT)
        assert PASSWORD not in "".join(traceback.format_exception(refused.value))
    with server:
        url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}"
        async with kvtier.open(config(tmp_path, url), layout=LAYOUT, observer=Raising()) as store:
            for number in range(10):
                await use(store, number)
            await store.flush(deadline_seconds=2.0)
            spoil(tmp_path)
            for number in range(10):  # some are in memory no more
                await store.get(prompt(number), deadline_seconds=2.0)
            server.freeze()
            for number in range(20):
                await use(store, number)
            server.thaw()
            server.kill()
            for number in range(20):
                await use(store, number)
    records = everything.records
    assert {"corrupt", "degraded", "observer"} <= {
        record.kvtier["event"] for record in records if record.name == "kvtier"
    }
    for record in records:
        said = text_of(record)
        for secret in (PASSWORD, SALT, ACCESS, SECRET, LORA, *map(str, TOKENS)):
            assert secret not in said, f"{record.name} shows {secret!r}: {said}"
    assert len(records) < 60, "twenty requests at a dead tier are not twenty lines"


async def test_records_have_their_facts_apart(everything):
    events = Events(None, SystemClock())
    events.emit("corrupt", tier="local-disk", key="a key", reason="checksum")
    (record,) = everything.records
    assert record.levelno == logging.WARNING
    assert record.kvtier == {
        "event": "corrupt", "tier": "local-disk", "key": "a key", "reason": "checksum", "suppressed": 0,
    }  # fmt: skip


async def test_one_line_a_minute_for_each_kind_and_tier(everything):
    clock = FrozenClock()
    events = Events(None, clock)
    for _ in range(100):
        events.emit("error", tier="redis", reason="away")
    events.emit("error", tier="s3", reason="away")
    events.emit("timeout", tier="redis", reason="away")
    assert [(r.kvtier["event"], r.kvtier["tier"]) for r in everything.records] == [
        ("error", "redis"), ("error", "s3"), ("timeout", "redis"),
    ]  # fmt: skip
    clock.advance(LOG_EVERY_SECONDS + 1)
    events.emit("error", tier="redis", reason="away")
    assert everything.records[-1].kvtier["suppressed"] == 99


async def test_a_tier_that_is_back_is_told_at_info(everything):
    Events(None, SystemClock()).emit("recovered", tier="redis")
    (record,) = everything.records
    assert (record.levelno, record.kvtier["event"]) == (logging.INFO, "recovered")

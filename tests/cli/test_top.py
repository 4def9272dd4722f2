"""`kvtier top` on the metrics of a real store behind a real endpoint, which goes away and comes back."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from kvtier.cli.scrape import parse, quantile, view
from kvtier.metrics.prometheus import StoreCollector
from kvtier.metrics.requests import RequestMetrics
from kvtier.store import open_chunks


class Served:
    """A store in a thread of its own and its metrics on a port, as a server has them."""

    def __init__(self, folder):
        self.folder = folder
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def _open(self):
        tiers = [
            {"backend": "pinned-cpu", "capacity": "1MiB"},
            {"backend": "local-disk", "path": str(self.folder), "capacity": "8MiB"},
        ]
        store = await open_chunks({"tiers": tiers})
        self.registry.register(StoreCollector(store))
        return store

    def __enter__(self):
        self.thread.start()
        self.store = self.run(self._open())
        self.serve()
        return self

    def serve(self, port=0):
        self.server, self.server_thread = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        self.port = self.server.server_port

    def stop_serving(self):
        self.server.shutdown()
        self.server.server_close()
        self.server_thread.join()

    def __exit__(self, *_):
        self.stop_serving()
        self.run(self.store.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/metrics"

    def put(self, key):
        self.run(self.store.put(key, os.urandom(100_000), wait="durable"))

    def stats(self):
        async def look():  # on the store's own loop
            return self.store.stats().tiers

        return self.run(look())

    def get(self, key):
        return self.run(self.store.get(key))


@pytest.fixture
def served(tmp_path):
    with Served(tmp_path / "kv") as served:
        yield served


def tiers(shown):
    return {tier["name"]: tier for tier in shown["tiers"]}


def test_once_shows_what_the_store_counted(kvtier, served):
    served.put("a")
    for _ in range(3):
        served.get("a")
    served.get("nothing")
    served.requests.observe(prompt_tokens=100, loaded_tokens=64, first_token_seconds=0.2)
    served.requests.observe(prompt_tokens=100, loaded_tokens=0, first_token_seconds=0.9)
    shown = kvtier("top", served.url, "--once", "--json").json
    memory, disk = tiers(shown)["pinned-cpu"], tiers(shown)["local-disk"]
    stats = served.stats()
    assert (memory["hits"], memory["lookups"]) == (3, stats["pinned-cpu"].lookups)
    assert memory["hit_rate"] == 3 / stats["pinned-cpu"].lookups
    assert (disk["bytes"], disk["capacity"]) == (stats["local-disk"].bytes, 8 << 20)
    assert memory["written_bytes_per_hit"] == stats["pinned-cpu"].written_bytes_per_hit
    assert 100_000 <= 3 * memory["written_bytes_per_hit"] < 110_000
    assert (disk["written_bytes_per_hit"], stats["local-disk"].written_bytes_per_hit) == (None, None)
    assert (memory["up"], memory["breaker"], disk["up"], disk["breaker"]) == (True, "closed", True, "closed")
    assert (shown["tokens_loaded"], shown["tokens_computed"], shown["requests"]) == (64, 136, 2)
    assert 0.2 <= shown["first_token_p50_seconds"] < 0.3
    assert 0.9 <= shown["first_token_p99_seconds"] < 1.3


def test_for_people_it_fits_into_80_columns(kvtier, served):
    for number in range(20):
        served.put(f"key {number}")
    said = kvtier("top", served.url, "--once")
    assert said.status == 0
    assert all(len(line.rstrip()) <= 80 for line in said.out.splitlines())
    assert "…" not in said.out
    evicted = served.stats()["pinned-cpu"].evicted
    assert evicted > 5
    for word in ("pinned-cpu", "local-disk", "up", "corrupt 0", f"evicted {evicted}"):
        assert word in said.out


def test_large_figures_fit_too(kvtier, tmp_path):
    lines = []
    for tier in ("pinned-cpu", "local-disk", "redis", "a-name-of-14-l"):
        lines += [
            f'kvtier_tier_up{{tier="{tier}"}} 1',
            f'kvtier_usage_bytes{{tier="{tier}"}} 12345678901234',
            f'kvtier_capacity_bytes{{tier="{tier}"}} 12345678901234',
            f'kvtier_lookups_chunks_total{{result="hit",tier="{tier}"}} 123456789',
            f'kvtier_transfers_bytes_total{{op="read",tier="{tier}"}} 12345678901',
            f'kvtier_transfers_bytes_total{{op="write",tier="{tier}"}} 12345678901234567',
            f'kvtier_operation_seconds_bucket{{le="0.0625",op="read",tier="{tier}"}} 7',
        ]
    (tmp_path / "scrape").write_text("\n".join(lines) + "\n")
    said = kvtier("top", "scrape", "--once")
    assert said.status == 0
    assert "…" not in said.out
    assert all(len(line.rstrip()) <= 80 for line in said.out.splitlines())
    assert "a-name-of-14-l" in said.out
    assert "local-disk 100 MB" in said.out
    assert "123 M" in said.out


def test_damage_shows(kvtier, served):
    served.put("a")
    (path,) = (served.folder / "entries").glob("*/*/*")
    content = bytearray(path.read_bytes())
    content[50_000] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    for number in range(12):  # out of the memory tier
        served.put(f"key {number}")
    assert served.get("a") is None
    shown = kvtier("top", served.url, "--once", "--json").json
    assert shown["corrupt"] == tiers(shown)["local-disk"]["corrupt"] == 1
    assert "local-disk: corrupt 1" in kvtier("top", served.url, "--once").out


def test_a_scrape_in_a_file(kvtier, served, tmp_path):
    (tmp_path / "scrape").write_bytes(generate_latest(served.registry))
    assert list(tiers(kvtier("top", "scrape", "--once", "--json").json)) == ["pinned-cpu", "local-disk"]


@pytest.mark.parametrize(
    ("source", "status", "told"),
    [
        ("http://127.0.0.1:1/metrics", 1, "is the server running"),
        ("nofile", 2, "write the address of a metrics endpoint"),
        ("http://", 1, "http://"),
        ("empty", 2, "register a StoreCollector"),
        ("prose", 2, "no Prometheus text"),
    ],
)
def test_mistakes(kvtier, tmp_path, source, status, told):
    (tmp_path / "empty").write_text("")
    (tmp_path / "prose").write_text("kvtier_tier_up{tier=\n")
    said = kvtier("top", source, "--once")
    assert (said.status, told in said.text) == (status, True), said.text


def test_rates_come_from_two_looks_and_a_restart_begins_anew():
    def scrape(read, when):
        text = f'kvtier_tier_up{{tier="d"}} 1\nkvtier_transfers_bytes_total{{op="read",tier="d"}} {read}\n'
        return parse(text, when=when)

    first, second, restarted = scrape(100, 10.0), scrape(400, 12.0), scrape(50, 14.0)
    assert view(first, None).tiers[0].read_bytes_per_second is None
    assert view(second, first).tiers[0].read_bytes_per_second == 150
    assert view(restarted, second).tiers[0].read_bytes_per_second == 25


def test_quantiles_of_a_histogram():
    buckets = {0.1: 50, 0.5: 98, 1.0: 99, float("inf"): 100}
    assert [quantile(buckets, share) for share in (0.5, 0.9, 0.99)] == [0.1, 0.5, 1.0]
    assert quantile(buckets, 1.0) is None
    assert quantile({}, 0.5) is None


def test_live_it_outlives_the_server(served, tmp_path):
    command = [sys.executable, "-m", "kvtier", "top", served.url, "--json", "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    def until(wanted):
        return next(line for line in map(json.loads, process.stdout) if wanted(line))

    try:
        assert until(lambda line: "tiers" in line)["corrupt"] == 0
        served.stop_serving()
        until(lambda line: "refused" in line.get("away", ""))
        served.serve(served.port)
        served.put("a")
        assert until(lambda line: "tiers" in line and tiers(line)["local-disk"]["bytes"])
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_live_for_people(served, tmp_path):
    """On a terminal of 80 columns, as over SSH."""
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    command = [sys.executable, "-m", "kvtier", "top", served.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment, cwd=tmp_path)
    os.close(child)
    seen, deadline = b"", time.monotonic() + 100
    while b"local-disk" not in seen and time.monotonic() < deadline:
        seen += os.read(parent, 4096)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            seen += os.read(parent, 4096)
        except OSError:
            break
    os.close(parent)
    assert process.wait(60) == 0
    assert b"local-disk" in seen
    assert b"Traceback" not in seen

"""Several processes on one directory, let go together each round, some of them killed: nothing wrong is read."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier

PEER = Path(__file__).with_name("disk_peers.py")
PROCESSES, ROUNDS = 3, 7
CAPACITY = 8 << 20

pytestmark = pytest.mark.slow


def start(root, number):
    command = [sys.executable, str(PEER), str(root), str(number), str(ROUNDS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def on_disk(root):
    return sum(path.stat().st_size for path in root.glob("entries/*/*/*") if path.exists())


async def test_processes_share_a_directory(tmp_path):
    choose = random.Random(1)
    numbers = iter(range(100))
    peers = [start(tmp_path, next(numbers)) for _ in range(PROCESSES)]
    killed = 0
    try:
        for round_ in range(ROUNDS):
            for process in peers:
                assert process.stdout.readline() == "ready\n"
            assert on_disk(tmp_path) <= CAPACITY
            for process in peers:
                process.stdin.write("go\n")
                process.stdin.flush()
            if round_ == 3:  # in the middle of what it does
                victim = peers.pop(choose.randrange(len(peers)))
                finish(victim)
                killed += 1
        reports = [json.loads(process.stdout.readline()) for process in peers]
        assert [process.wait() for process in peers] == [0] * len(peers)
    finally:
        for process in peers:
            finish(process)
    assert killed == 1
    assert sum(report["read"] for report in reports) > 20
    for what in ("wrong", "corrupt", "errors"):
        assert [report[what] for report in reports] == [0] * len(reports), what
    tier = {"backend": "local-disk", "name": "disk", "path": str(tmp_path), "capacity": "8MiB"}
    async with kvtier.open_chunks({"tiers": [tier]}) as store:
        assert sum([1 async for _ in store.list("")]) == store.stats().tiers["disk"].entries
        assert store.stats().tiers["disk"].bytes == on_disk(tmp_path) <= CAPACITY
        assert store.stats().tiers["disk"].medium["directory_bytes"] == on_disk(tmp_path)
    assert not [path for path in tmp_path.glob("owners/*/*") if path.name != "lock"]

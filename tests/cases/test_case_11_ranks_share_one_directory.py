"""Case 11: two processes on one directory: ranks never see each other's values, one namespace is shared by both.

Run as a program with a directory and a rank, this file is one of the two processes: it reads a command per line and
answers each with a line.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import kvtier

LAYOUT = kvtier.KVLayout(num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32")
CHUNK = 16
PROMPTS = [list(range(number * 1000, number * 1000 + 2 * CHUNK)) for number in range(50)]  # 100 chunks
ALL = len(PROMPTS)
SHARED = kvtier.Namespace(model="org/model", revision="1")


def kv_of(number, owner):
    """Values that tell whose they are."""
    chosen = torch.Generator().manual_seed(1 + number + 10_000 * owner)
    return {name: torch.randn(1, 2 * CHUNK, 2, 8, generator=chosen) for name in "kv"}


def owner_of(hit, number):
    """Whose values these are; None: nothing is there; "both": a chunk of each. Anything else is an error."""
    if hit is None:
        return None
    owners = [owner_of_chunk(hit, number, first) for first in range(0, hit.num_tokens, CHUNK)]
    if len(owners) == 2 and None not in owners:
        return owners[0] if owners[0] == owners[1] else "both"
    return f"{hit.num_tokens} tokens of {owners}"


def owner_of_chunk(hit, number, first):
    for owner in (0, 1):
        wanted, chunk = kv_of(number, owner), slice(first, first + CHUNK)
        if all(torch.equal(hit.kv[name][:, chunk], wanted[name][:, chunk]) for name in "kv"):
            return owner
    return None


class Worker:
    """What one process does on command, for prompts [first, stop)."""

    def __init__(self, store, rank):
        self.store = store
        self.rank = rank

    async def put(self, first, stop):
        async def one(number):
            await self.store.put(PROMPTS[number], kv_of(number, self.rank), wait="durable")

        await asyncio.gather(*(one(number) for number in range(first, stop)))

    async def get(self, first, stop):
        return [owner_of(await self.store.get(PROMPTS[number]), number) for number in range(first, stop)]

    async def list(self, first, stop):
        return sorted([entry.key async for entry in self.store.list()])

    async def delete(self, first, stop):
        return [await self.store.delete(PROMPTS[number]) for number in range(first, stop)]

    async def clear(self, first, stop):
        await self.store.clear()


async def work(root, namespace, rank):
    tier = {"backend": "local-disk", "path": root, "capacity": "64MiB", "negative_seconds": 0.001}
    config = {"chunk_tokens": CHUNK, "deadline_seconds": 60, "tiers": [tier], "memory": {"staging_bytes": "4MiB"}}
    chosen = SHARED if namespace == "shared" else kvtier.Namespace(model="org/model", revision="1", tp=rank, tp_size=2)
    async with kvtier.open(config, namespace=chosen, layout=LAYOUT) as store:
        worker = Worker(store, rank)
        print(json.dumps("open"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            verb, first, stop = json.loads(line)
            print(json.dumps(await getattr(worker, verb)(first, stop)), flush=True)


class Process:
    """The other side of `work`."""

    def __init__(self, root, namespace, rank):
        command = [sys.executable, __file__, str(root), namespace, str(rank)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self):
        line = self.child.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def ask(self, verb, first=0, stop=ALL):
        self.child.stdin.write(json.dumps([verb, first, stop]) + "\n")
        self.child.stdin.flush()

    def do(self, verb, first=0, stop=ALL):
        self.ask(verb, first, stop)
        return self.answer()

    def end(self):
        self.child.stdin.close()
        self.child.wait(60)
        self.child.stdout.close()
        return self.child.returncode


@pytest.fixture
def start(tmp_path):
    """Start processes that are ended whatever happens."""
    started = []

    def start(*args):
        begun = [Process(tmp_path, namespace, rank) for namespace, rank in args]
        started.extend(begun)
        assert all(process.answer() == "open" for process in begun)
        return begun

    yield start
    for process in started:
        if process.child.poll() is None:
            process.child.kill()
        process.end()


def test_ranks_see_only_their_own(start):
    zero, one = start(("rank", 0), ("rank", 1))
    zero.ask("put")
    one.ask("put")
    zero.answer(), one.answer()
    assert zero.do("get") == [0] * ALL
    assert one.do("get") == [1] * ALL
    keys = zero.do("list"), one.do("list")
    assert [len(listed) for listed in keys] == [2 * ALL, 2 * ALL]
    assert not set(keys[0]) & set(keys[1])
    assert zero.do("delete", 0, 20) == [2] * 20
    assert zero.do("delete", 0, 20) == [0] * 20
    assert zero.do("get") == [None] * 20 + [0] * 30
    assert one.do("get") == [1] * ALL
    zero.do("clear")
    assert zero.do("list") == []
    assert one.do("list") == keys[1]
    assert one.do("get") == [1] * ALL
    assert [zero.end(), one.end()] == [0, 0]


def test_one_namespace_is_shared_and_outlives_a_killed_process(start):
    zero, one = start(("shared", 0), ("shared", 1))
    zero.ask("put", 0, 30)
    one.ask("put", 20, ALL)
    zero.answer(), one.answer()
    seen = zero.do("get"), one.do("get")
    assert seen[0] == seen[1], "the two read different values of one chunk"
    assert seen[0][:20] == [0] * 20
    assert seen[0][30:] == [1] * 20
    assert set(seen[0][20:30]) <= {0, 1, "both"}  # a prompt's two chunks are two values: either process may win each
    assert zero.do("list") == one.do("list")
    assert len(one.do("list")) == 2 * ALL

    zero.ask("put")  # and is killed in the middle of it
    os.kill(zero.child.pid, signal.SIGKILL)
    zero.child.wait(60)
    assert one.do("get") == seen[1]
    assert one.do("delete", 0, 10) == [2] * 10
    (two,) = start(("shared", 0))
    assert two.do("get") == [None] * 10 + seen[0][10:]
    two.do("put", 0, 10)
    assert one.do("get", 0, 10) == [0] * 10
    assert [one.end(), two.end()] == [0, 0]


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3])))

"""Case 1: processes killed at any moment while they write leave whole values and no garbage; the living are left alone.

Run as a program, this file forks the children: `ROOT CYCLES SEED`. It prints one JSON object
of what the stores that were opened after the kills saw. It never starts a thread, so that children fork from a clean
process.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from kvtier.backends import local_disk
from kvtier.backends.disk_layout import ENTRIES, directory, shard_of, shard_path
from kvtier.store import open_chunks

KEYS = [f"key {number}" for number in range(50)]
VERIFY_EVERY = 5
CYCLES = 60
SIZES = [1, 100, 5_000, 60_000, 300_000, 3 << 20]


def value_of(key, version):
    """Bytes that say what they are, and of which any part is wrong in any other place or value."""
    head = f"{key}:{version}:".encode()
    digest = hashlib.sha256(head).digest()
    size = random.Random(f"{key}{version}").choice(SIZES)
    block = b"".join((number ^ int.from_bytes(digest[:4], "little")).to_bytes(4, "little") for number in range(500))
    return head + (block * (size // len(block) + 1))[:size]


def is_whole(key, found):
    owner, version, _ = found.split(b":", 2)
    return owner.decode() == key and value_of(key, int(version)) == found


def config_of(root, codecs=()):
    tier = {"backend": "local-disk", "name": "disk", "path": str(root), "capacity": "1GiB", "codecs": codecs}
    return {"deadline_seconds": 60, "memory": {"staging_bytes": "16MiB"}, "tiers": [tier]}


def unfinished(root):
    return sorted(Path(root).glob("owners/*/*.tmp"))


def entries(root):
    return [path for path in (Path(root) / "entries").rglob("*") if path.is_file()]


async def write_for_ever(root, seed, ready):
    choose = random.Random(seed)
    async with open_chunks(config_of(root)) as store:
        ready()

        async def one():
            while True:
                key = choose.choice(KEYS)
                await store.put(key, value_of(key, choose.randrange(1000)), wait="durable")

        await asyncio.gather(one(), one())


async def verify(root, *, alone):
    """Open a fresh store among what the dead left; read everything, list everything."""
    seen = Counter(unfinished_before=len(unfinished(root)))
    async with open_chunks(config_of(root)) as store:
        seen["unfinished"] = len(unfinished(root))
        listed = [entry.key async for entry in store.list()]
        seen["strange_keys"] = len(set(listed) - set(KEYS)) + len(listed) - len(set(listed))
        found = {key: await store.get(key) for key in KEYS}
        seen["read"] = sum(value is not None for value in found.values())
        seen["wrong"] = sum(value is not None and not is_whole(key, value) for key, value in found.items())
        tier = store.stats().tiers["disk"]
        seen["torn"] = tier.corrupt + tier.expired  # a file that was not finished has a wrong time of expiry too
        seen["errors"] = tier.errors
        await store.flush()  # what was bad is off the medium then
        if alone:
            there = sum(path.stat().st_size for path in entries(root))
            seen["miscounted"] = abs(store.stats().tiers["disk"].bytes - there)
    return seen


def stop_half_way_in_place(reached, go_on):
    """The control: write without a temporary file, and wait where half of the first entry is there."""

    def write_in_place(medium, write):
        content = b"".join(bytes(view) for view in write.views)
        leaf_path = shard_path(shard_of(write.name))
        with medium.root.in_use() as top, directory(top, ENTRIES, *leaf_path, create=True) as leaf:
            fd = os.open(write.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=leaf)
            os.write(fd, content[: len(content) // 2])
            os.utime(fd, ns=(write.mtime, write.mtime))
            os.write(reached, b"!")
            os.read(go_on, 1)

    local_disk.write_entry = write_in_place


def stop_before_publishing(reached, go_on):
    """Stop where the temporary file is complete and the entry is not there yet."""
    utime = os.utime

    def waiting(*args, **kwargs):
        os.utime = utime
        utime(*args, **kwargs)
        os.write(reached, b"!")
        os.read(go_on, 1)

    os.utime = waiting


children = set()  # that may still run


def wait_for(child):
    children.discard(child)
    return os.waitpid(child, 0)[1]


def fork(work):
    """Run `work(write, read)` in a child, with the ends of two pipes; return its pid and the other ends."""
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(from_child)
        os.close(to_child)
        status = 1
        try:
            work(to_parent, from_parent)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    children.add(child)
    os.close(to_parent)
    os.close(from_parent)
    return child, from_child, to_child


def verified(root, *, alone=True):
    child, reader, writer = fork(
        lambda out, _: os.write(out, json.dumps(asyncio.run(verify(root, alone=alone))).encode())
    )
    with os.fdopen(reader) as pipe:
        seen = pipe.read()
    assert wait_for(child) == 0
    os.close(writer)
    return Counter(json.loads(seen))


def kill(child, *pipes):
    os.kill(child, signal.SIGKILL)
    wait_for(child)
    for pipe in pipes:
        os.close(pipe)


def kill_many(root, cycles, seed):
    moments, total = random.Random(seed), Counter()
    for cycle in range(1, cycles + 1):
        name = f"{seed}-{cycle}"
        child, reader, writer = fork(
            lambda out, _, name=name: asyncio.run(write_for_ever(root, name, lambda: os.write(out, b"!")))
        )
        if cycle % 4:  # else it may be killed while it opens
            assert os.read(reader, 1) == b"!"
        time.sleep(moments.uniform(0.001, 0.06))
        kill(child, reader, writer)
        if cycle % VERIFY_EVERY == 0:
            total += verified(root)
    return total


async def put_once(root):
    async with open_chunks(config_of(root)) as store:
        await store.put("key 0", value_of("key 0", 777), wait="durable")
        assert is_whole("key 0", await store.get("key 0"))


def stopped_writer(root, stop=stop_before_publishing):
    """A process in the middle of a put."""

    def work(out, back):
        stop(out, back)
        asyncio.run(put_once(root))

    child, reader, writer = fork(work)
    assert os.read(reader, 1) == b"!"
    return child, reader, writer


def leave_one_behind(root):
    """Kill a process in the middle of a put: its temporary file is there for certain."""
    kill(*stopped_writer(root))
    assert len(unfinished(root)) == 1
    return verified(root)


def leave_one_in_place(root):
    kill(*stopped_writer(root, stop_half_way_in_place))
    assert len(entries(root)) == 1
    return verified(root)


def beside_a_living_writer(root):
    """A fresh store opens and reads while another process is in the middle of a put, which then succeeds."""
    child, reader, writer = stopped_writer(root)
    (file,) = unfinished(root)
    seen = verified(root)
    seen["left_alone"] = int(unfinished(root) == [file])
    os.write(writer, b"!")
    seen["status"] = wait_for(child)
    os.close(reader)
    os.close(writer)
    later = verified(root)
    return {**seen, "published": later["read"] - seen["read"], "unfinished_later": later["unfinished"]}


def beside_a_busy_writer(root, seed):
    """Fresh stores open while another process writes all the time; it goes on, and is whole."""
    child, reader, writer = fork(lambda out, _: asyncio.run(write_for_ever(root, seed, lambda: os.write(out, b"!"))))
    assert os.read(reader, 1) == b"!"
    total = Counter()
    for _ in range(5):
        total += verified(root, alone=False)
    alive = os.waitpid(child, os.WNOHANG) == (0, 0)
    kill(child, reader, writer)
    return {**total, "alive": alive}


def main():
    root, cycles, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print(
        json.dumps(
            {
                "kills": kill_many(root / "kills", cycles, seed),
                "one": leave_one_behind(root / "one"),
                "in place": leave_one_in_place(root / "in place"),
                "living": beside_a_living_writer(root / "living"),
                "busy": beside_a_busy_writer(root / "busy", seed),
            }
        )
    )


def run(root, cycles):
    command = [sys.executable, __file__, str(root), str(cycles), "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {name: Counter(seen) for name, seen in json.loads(ended.stdout).items()}


def assert_nothing_wrong(seen):
    for what in ("wrong", "torn", "strange_keys", "errors", "miscounted"):
        assert seen[what] == 0, f"{what}: {seen}"


def test_values_are_whole_and_nothing_is_left_behind(tmp_path):
    seen = run(tmp_path, CYCLES)
    assert seen["kills"]["read"] > 50, "too little was written to tell anything"
    assert_nothing_wrong(seen["kills"])
    assert seen["kills"]["unfinished"] == 0

    assert seen["one"]["unfinished_before"] == 1
    assert (seen["one"]["unfinished"], seen["one"]["read"]) == (0, 0)
    assert_nothing_wrong(seen["one"])

    assert seen["living"]["left_alone"] == 1, "the unfinished file of a living process was taken away"
    assert (seen["living"]["read"], seen["living"]["published"], seen["living"]["status"]) == (0, 1, 0)
    assert seen["living"]["unfinished_later"] == 0
    assert_nothing_wrong(seen["living"])

    assert seen["busy"]["alive"]
    assert seen["busy"]["read"] > 0
    assert seen["busy"]["wrong"] == seen["busy"]["torn"] == seen["busy"]["strange_keys"] == 0

    # The control: had the writer no temporary file, the same kill would leave a torn entry; the store serves none.
    assert (seen["in place"]["torn"], seen["in place"]["read"], seen["in place"]["wrong"]) == (1, 0, 0)


if __name__ == "__main__":
    try:
        main()
    finally:
        for left in children:
            os.kill(left, signal.SIGKILL)

"""One of several processes on one directory; run by `test_disk_processes.py`.

    python disk_peers.py ROOT NUMBER ROUNDS

Waits for a line on its input before each round, and prints one JSON object at the end.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import sys

import kvtier

SIZES = [100, 20_000, (1 << 20) - 8192, 1 << 20]
KEYS = [f"key {i}" for i in range(12)]


def value_of(key, version):
    head = f"{key}|{version}|".encode()
    size = SIZES[random.Random(f"{key}{version}").randrange(len(SIZES))]
    return (head + hashlib.sha256(head).digest() * (size // 32 + 1))[:size]


def is_whole(key, found):
    name, version, _ = bytes(found).split(b"|", 2)
    return name.decode() == key and bytes(found) == value_of(key, version.decode())


async def main():
    root, number, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(number)
    seen = {"read": 0, "wrong": 0, "corrupt": 0, "errors": 0}
    tier = {"backend": "local-disk", "name": "disk", "path": root, "capacity": "8MiB", "negative_seconds": 0.001}
    async with kvtier.open_chunks({"tiers": [tier], "deadline_seconds": 60}) as store:
        for _ in range(rounds):
            print("ready", flush=True)
            sys.stdin.readline()
            for _ in range(6):
                key = choose.choice(KEYS)
                with contextlib.suppress(kvtier.CapacityError):
                    await store.put(key, value_of(key, choose.randrange(1000)), wait="durable")
                for key in choose.sample(KEYS, 4):
                    found = await store.get(key)
                    seen["read"] += found is not None
                    seen["wrong"] += found is not None and not is_whole(key, found)
                if choose.random() < 0.2:
                    await store.delete(choose.choice(KEYS))
        stats = store.stats().tiers["disk"]
        seen["corrupt"], seen["errors"] = stats.corrupt, stats.errors + stats.timeouts
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

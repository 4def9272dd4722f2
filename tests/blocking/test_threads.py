"""Many threads on one store: no call lost, none counted twice, nothing left behind."""

import contextlib
import gc
import os
import random
import threading

import kvtier
from kvtier.testing.kv_values import same_bits

THREADS = 8
CALLS = int(os.environ.get("KVTIER_BLOCKING_CALLS", "400"))  # 10,000 for each thread take about a minute


def test_mixed_calls_from_eight_threads(kit):
    prompts = [list(range(base, base + 16)) for base in range(0, 1600, 100)]
    errors, made = [], [0] * THREADS
    with kit.open(queue_calls=64) as store:

        def client(number):
            dice = random.Random(number)
            try:
                for _ in range(CALLS):
                    made[number] += one_call(store, kit, dice, dice.choice(prompts))
            except BaseException as exc:
                errors.append(exc)
                raise

        threads = [threading.Thread(target=client, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(280)
        assert errors == []
        assert not any(thread.is_alive() for thread in threads)
        assert store.drain(deadline_seconds=60)
        counts = store.calls
        assert counts.submitted + counts.dropped == sum(made)
        assert counts.under_way == 0
        assert counts.submitted == counts.ended + counts.overdue + counts.cancelled
        gc.collect()
        stats = store.stats()
        tier = stats.tiers["pinned-cpu"]
        assert tier.lookups == tier.hits + tier.misses + tier.skipped
        assert tier.written - tier.evicted - tier.deleted - tier.expired == tier.entries
        assert (stats.reads_under_way, stats.memory.leased) == (0, 0)
        assert not store._thread._running
        assert not store._thread._inbox


def one_call(store, kit, dice, tokens):
    """Make one step of a client; return how many calls it was. A value that is not this prompt's raises."""
    kind = dice.randrange(10)
    if kind < 3:
        hit = store.get(tokens, deadline_seconds=60)
        if hit is not None:
            for name, tensor in kit.kv(tokens[: hit.num_tokens]).items():
                assert same_bits(hit.kv[name], tensor)
    elif kind < 5:
        store.put(tokens, kit.kv(tokens), deadline_seconds=60)
    elif kind < 7:
        assert store.exists(tokens, deadline_seconds=60) in range(0, 17, 4)
    elif kind == 7:
        store.delete(tokens, start=8, deadline_seconds=60)
    elif kind == 8:
        store.chunks.put(f"blob {dice.randrange(5)}", b"x" * 100, deadline_seconds=60)
    else:
        future = store.submit(kvtier.KVStore.exists, tokens, deadline_seconds=60)
        if dice.randrange(2):
            future.cancel()
        else:
            with contextlib.suppress(kvtier.CapacityError):  # dropped, and counted so
                future.result(60)
    return 1

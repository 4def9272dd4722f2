"""The same requests through a real store of tiny chunks and through the simulator: the same counts, to the last one."""

import random

import pytest
import torch

import kvtier
from kvtier.config import load_config
from kvtier.registry import policies
from kvtier.sim.replay import Replay
from kvtier.sim.tier import SimTier
from kvtier.sim.trace import Request, Trace
from kvtier.store import opening
from kvtier.store.engine import Engine
from kvtier.store.faces import largest_object
from kvtier.store.kv import KVStore
from kvtier.testing.clock import FrozenClock
from kvtier.tier.settings import TierSettings

CHUNK_TOKENS = 4
LAYOUT = kvtier.KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="bfloat16")
CHUNK_BYTES = -(-largest_object(LAYOUT, CHUNK_TOKENS) // 4096) * 4096
COUNTED = ("hits", "written", "evicted", "promoted", "demoted", "held_back")
NAMES = [name for name in policies.names() if name != "ttl"]


def prompts(seed, requests=120):
    """Sessions that grow by turns, over a shared beginning, and go on at random."""
    draw = random.Random(seed)
    fresh = iter(range(1, 100_000))
    system = [next(fresh)]
    sessions = [system]
    for _ in range(requests):
        before = draw.choice(sessions[-12:]) if draw.random() < 0.7 else system
        prompt = [*before, *(next(fresh) for _ in range(draw.randint(0, 4)))][:14]
        sessions.append(prompt)
        yield prompt


def open_store(tiers, clock):
    config = load_config({"chunk_tokens": CHUNK_TOKENS, "tiers": tiers, "memory": {"staging_bytes": "4MiB"}})
    made = opening._engine(config, observer=None, strict=None, lossless=None, chunk_bytes=0)
    engine = Engine(made.settings, made._parts, clock=clock)
    namespace = kvtier.Namespace(model="org/model", revision="1")
    return KVStore(engine, namespace=namespace, layout=LAYOUT, chunk_tokens=CHUNK_TOKENS)


async def replay_in_a_store(tiers, paths):
    clock = FrozenClock()
    async with open_store(tiers, clock) as store:
        for path in paths:
            clock.advance(1.0)
            tokens = [node for node in path for _ in range(CHUNK_TOKENS)]
            hit = await store.get(tokens)
            start = hit.num_tokens if hit else 0
            kv = torch.zeros(1, len(tokens) - start, 1, 4, dtype=torch.bfloat16)
            del hit
            await store.put(tokens, {"k": kv, "v": kv}, start=start)
            if tiers[-1]["backend"] != "pinned-cpu":
                await store.flush()  # the simulator writes at once
        return [{name: tier.counters[name] for name in COUNTED} for tier in store.stats().tiers.values()]


def replay_in_the_simulator(tiers, paths):
    sims = [
        SimTier(
            TierSettings(
                name=tier["name"],
                capacity=tier["capacity"],
                write=tier.get("write", "through"),
                promote=tier.get("promote", "always"),
                admit=tier.get("admit", "always"),
            ),
            policies.load(tier["policy"])(),
        )
        for tier in tiers
    ]
    requests = []
    for number, path in enumerate(paths, 1):
        keys = [str(node) for node in path]
        requests.append(Request(float(number), keys, len(keys), len(keys) * CHUNK_TOKENS))
    Replay(sims, block_bytes=CHUNK_BYTES).run(Trace("same", requests, CHUNK_TOKENS))
    return [{name: getattr(sim, name) for name in COUNTED} for sim in sims]


@pytest.mark.parametrize("name", NAMES)
async def test_one_tier(name):
    for seed in range(2):
        paths = list(prompts(seed))
        tiers = [{"backend": "pinned-cpu", "name": "top", "capacity": 24 * CHUNK_BYTES, "policy": name}]
        told = replay_in_the_simulator(tiers, paths)
        assert told == await replay_in_a_store(tiers, paths), f"seed {seed}"
        assert told[0]["evicted"] > 100
        assert told[0]["hits"] > 50


def two_tiers(write, admit, policy="lru"):
    top = {"backend": "pinned-cpu", "name": "top", "capacity": 20 * CHUNK_BYTES, "policy": policy, "promote": "never"}
    below = {"backend": "pinned-cpu", "name": "below", "capacity": 60 * CHUNK_BYTES, "policy": policy}
    return [top, below | {"write": write, "admit": admit}]


@pytest.mark.parametrize("admit", ["always", "second-touch"])
@pytest.mark.parametrize("write", ["through", "back"])
async def test_two_tiers(write, admit):
    paths = list(prompts(5))
    tiers = two_tiers(write, admit)
    told = replay_in_the_simulator(tiers, paths)
    assert told == await replay_in_a_store(tiers, paths)
    assert told[1]["hits"] > 0
    assert (told[1]["demoted"] > 0) == (write == "back")
    assert (told[1]["held_back"] > 0) == (admit == "second-touch")


@pytest.mark.parametrize("name", NAMES)
async def test_two_tiers_under_every_policy(name):
    paths = list(prompts(6, requests=80))
    tiers = two_tiers("back", "second-touch", name)
    assert replay_in_the_simulator(tiers, paths) == await replay_in_a_store(tiers, paths)


@pytest.mark.parametrize("promote", ["always", "second-touch", "never"])
async def test_what_a_stored_tier_gives_is_promoted(tmp_path, promote):
    """Under `lru` alone: the order in which writes to a disk are done differs from run to run, and others heed it."""
    paths = list(prompts(5, requests=60))
    top = {"backend": "pinned-cpu", "name": "top", "capacity": 20 * CHUNK_BYTES, "policy": "lru", "promote": promote}
    below = {"backend": "local-disk", "name": "below", "capacity": 60 * CHUNK_BYTES, "policy": "lru"}
    told = replay_in_the_simulator([top, below], paths)
    assert told == await replay_in_a_store([top, below | {"path": str(tmp_path)}], paths)
    assert told[1]["hits"] > 20
    assert told[1]["evicted"] > 20
    assert (told[0]["promoted"] > 0) == (promote != "never")


def test_the_filter_saves_writes_of_what_is_used_once():
    paths = list(prompts(5))
    every, twice = (
        replay_in_the_simulator(two_tiers("through", admit), paths)[1] for admit in ("always", "second-touch")
    )
    assert twice["written"] < 0.7 * every["written"]
    assert twice["written"] / twice["hits"] < every["written"] / every["hits"]

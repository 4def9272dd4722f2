"""The optimum against brute force, and every policy against the optimum."""

import random

import pytest

from kvtier.registry import policies
from kvtier.sim.optimum import endless_hits, optimal_hits
from kvtier.sim.replay import Replay
from kvtier.sim.study import SimulatedTier
from kvtier.sim.tier import SimTier
from kvtier.sim.trace import Request, Trace


def random_trace(seed, requests=7, keys=7):
    """Prompts that are paths of one random tree."""
    draw = random.Random(seed)
    parents = {str(i): str(draw.randrange(i)) if i and draw.random() < 0.8 else None for i in range(keys)}
    prompts = []
    for _ in range(requests):
        path, key = [], str(draw.randrange(keys))
        while key is not None:
            path.append(key)
            key = parents[key]
        prompts.append(path[::-1])
    return prompts


def brute_force(prompts, capacity):
    """The most hits over every way of keeping up to `capacity` of the blocks seen so far."""
    best = {frozenset(): 0}
    for prompt in prompts:
        after = {}
        for kept, hits in best.items():
            run = next((i for i, key in enumerate(prompt) if key not in kept), len(prompt))
            for choice in keep_sets(kept | set(prompt), capacity):
                after[choice] = max(after.get(choice, 0), hits + run)
        best = after
    return max(best.values())


def keep_sets(keys, capacity):
    """Every largest subset: to keep more is never worse."""
    from itertools import combinations

    return (frozenset(chosen) for chosen in combinations(sorted(keys), min(capacity, len(keys))))


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_it_is_what_brute_force_finds(capacity):
    for seed in range(300):
        prompts = random_trace(seed)
        assert optimal_hits(prompts, capacity) == brute_force(prompts, capacity), f"seed {seed}"


@pytest.mark.parametrize("name", policies.names())
def test_no_policy_is_above_it(name):
    if name == "ttl":
        pytest.skip("wraps another")
    for seed in range(100):
        prompts = random_trace(seed, requests=30, keys=15)
        trace = trace_of(prompts)
        for capacity in (2, 5, 9):
            tier = SimulatedTier.of(name, capacity=capacity)
            outcome = Replay([SimTier(tier.settings, tier.make_policy())], block_bytes=1).run(trace)
            assert outcome.hits <= optimal_hits(prompts, capacity), f"seed {seed}, {capacity} blocks"


def trace_of(prompts):
    requests = [Request(float(i), keys, len(keys), len(keys) * 512) for i, keys in enumerate(prompts)]
    return Trace("random", requests, 512)


def test_enough_room_is_an_endless_cache():
    prompts = random_trace(3, requests=20, keys=12)
    assert optimal_hits(prompts, 12) == endless_hits(prompts)

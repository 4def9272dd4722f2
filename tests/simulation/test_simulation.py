"""The whole store under seeded interleavings, faults, cancels and crashes; see `world` for what a scenario is.

A failing seed prints the command that replays it, with its trace.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.__main__ import command
from simulation.plan import plan_of
from simulation.world import simulate

SEEDS = 2000
BATCH = 100
ROOT = Path(__file__).parents[2]


def failures(seeds):
    found = []
    for seed in seeds:
        outcome = simulate(seed)
        if outcome.problems:
            found.append(f"seed {seed}: {outcome.problems[0]}\n  replay: {command(seed)}")
    return found


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_seeds(first):
    found = failures(range(first, first + BATCH))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", range(7, 1000, 41))
def test_a_seed_replays_exactly(seed):
    first, second = simulate(seed, keep_trace=True), simulate(seed, keep_trace=True)
    assert first.trace == second.trace
    assert (first.digest, first.calls, first.iterations) == (second.digest, second.calls, second.iterations)
    assert first.digest != simulate(seed + 1).digest


@pytest.mark.slow
def test_a_seed_replays_in_every_process():
    seeds = (3, 27, 45, 101)
    program = f"from simulation.world import simulate\nprint(*(simulate(seed).digest for seed in {seeds}))"
    here = " ".join(simulate(seed).digest for seed in seeds)
    for hash_seed in ("1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert ran.stdout.strip() == here


def test_the_seeds_cover_what_they_should():
    """So that a change of the plan cannot quietly leave a part of the store out."""
    plans = [plan_of(seed) for seed in range(SEEDS)]
    assert sum(plan.calm for plan in plans) >= SEEDS // 40
    assert sum(plan.face == "kv" for plan in plans) >= SEEDS // 8
    assert sum(any(epoch.crash_after is not None for epoch in plan.epochs) for plan in plans) >= SEEDS // 5
    assert sum(any(epoch.close_amid is not None for epoch in plan.epochs) for plan in plans) >= SEEDS // 8
    assert sum(len(plan.epochs) > 1 for plan in plans) >= SEEDS // 3
    assert sum(len(plan.tiers) == 4 for plan in plans) >= SEEDS // 20
    assert sum(any(tier.write == "back" for tier in plan.tiers) for plan in plans) >= SEEDS // 4
    assert sum(any(tier.down_until for tier in plan.tiers) for plan in plans) >= SEEDS // 20
    assert sum(not plan.weather.fair for plan in plans) >= SEEDS * 2 // 5
    assert sum(plan.cancels > 0 for plan in plans) >= SEEDS // 4

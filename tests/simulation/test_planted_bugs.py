"""The simulation's own test: bugs planted into the engine, one at a time, each of which some seed must show.

That takes several minutes, so it is not part of every run of the suite: `make simulate` runs it. What every run checks
is that the bugs can still be planted.
"""

import os

import pytest
from simulation.plants import PLANTS
from simulation.world import simulate

MOST_SEEDS = 800


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("KVTIER_PLANTS" not in os.environ, reason="minutes long; run it with make simulate")
def test_some_seed_shows_the_bug(plant, monkeypatch):
    plant.apply(monkeypatch)
    seeds = (plant.seed, *range(MOST_SEEDS))
    assert any(simulate(seed).problems for seed in seeds), f"{MOST_SEEDS} seeds do not show: {plant.name}"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_the_bug_can_be_planted(plant, monkeypatch):
    plant.apply(monkeypatch)

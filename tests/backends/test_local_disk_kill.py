"""Processes killed at any moment leave whole entries and no garbage; and the test can tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LOOP = Path(__file__).with_name("kill_loop.py")
CYCLES = int(os.environ.get("KVTIER_KILL_CYCLES", "100"))  # `make kill` asks for 3,000
CONTROL_CYCLES = 40


def kill(root, how, cycles):
    command = [sys.executable, str(LOOP), str(root), str(cycles), "7", how]
    environment = {**os.environ, "PYTHONPATH": str(LOOP.parents[2])}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=max(280, cycles), env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def test_entries_are_whole_after_kills(tmp_path):
    seen = kill(tmp_path, "published", CYCLES)
    assert seen["read"] > 100
    assert seen["torn"] == seen["foreign"] == 0
    assert seen["done"] > CYCLES // 2
    assert seen["lost"] == 0, "what was answered as written or deleted was not found so"
    assert seen["unfinished"] == seen["owners"] == 0
    assert seen["miscounted"] == 0
    assert len(list(tmp_path.glob("journal/*"))) == 1, "logs of the dead were not compacted away"


def test_what_a_store_flushed_is_there_after_kills(tmp_path):
    seen = kill(tmp_path, "flushed", max(15, CYCLES // 10))
    assert seen["done"] > 10
    assert seen["read"] > 10
    assert seen["lost"] == seen["unfinished"] == 0


def test_control_that_takes_a_put_for_a_flush_loses_values(tmp_path):
    seen = kill(tmp_path, "unflushed", 15)
    assert seen["done"] > 10
    assert seen["lost"] > 0


def test_control_that_writes_in_place_is_torn(tmp_path):
    seen = kill(tmp_path, "in-place", CONTROL_CYCLES)
    assert seen["read"] > 100
    assert seen["torn"] > 0


def test_control_that_answers_early_loses_values(tmp_path):
    seen = kill(tmp_path, "early", CONTROL_CYCLES)
    assert seen["done"] > CONTROL_CYCLES // 2
    assert seen["lost"] > 0

"""The kit must fail on every broken twin, in the tests that the twin names; and pass on what they are twins of."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.backends import BackendConformance, JournalConformance
from kvtier.testing.memory import ExpiringMemoryBackend, MemoryBackend
from kvtier.testing.memory_journal import MemoryJournalBackend

SUITE = Path(__file__).with_name("twin_suite.py")
ROOT = SUITE.parent.parent.parent
OUTCOME = re.compile(r"^\S*twin_suite\.py::Test(\w+)::(\w+)\S*(?: ([A-Z]+))?", re.MULTILINE)  # none: it was under way


def load_suite():
    spec = importlib.util.spec_from_file_location("twin_suite", SUITE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


suite = load_suite()
TWINS = suite.TWINS

TestControl = type("TestControl", (BackendConformance,), suite.on_shared_medium(MemoryBackend))
TestExpiringControl = type("TestExpiringControl", (BackendConformance,), suite.on_shared_medium(ExpiringMemoryBackend))
TestJournalControl = type("TestJournalControl", (JournalConformance,), suite.on_shared_medium(MemoryJournalBackend))


def run_suite(nodes):
    """Yield (twin, test, failed) of every test that began, in order; one that hangs for a minute ends all."""
    options = ["-v", "-rN", "--tb=no", "-p", "no:cacheprovider", "-o", "timeout=60", "-o", "timeout_method=thread"]
    command = [sys.executable, "-m", "pytest", *options, *(f"{SUITE}::Test{name}::{test}" for name, test in nodes)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    for name, test, outcome in OUTCOME.findall(run.stdout):
        yield name, test, outcome in ("FAILED", "")


@pytest.fixture(scope="module")
def failures():
    """Whether each test that a twin names failed on it (a hang is a failure), from runs in other processes."""
    waiting = [(name, test) for name, twin in TWINS.items() for test in twin.caught_by]
    failed = {}
    while waiting:
        results = list(run_suite(waiting))
        assert results, "nothing was run"
        for name, test, has_failed in results:
            of_twin = failed.setdefault(name, {})
            of_twin[test] = of_twin.get(test, False) or has_failed
        ran = {(name, test) for name, test, _ in results}
        waiting = [node for node in waiting if node not in ran]
    return failed


@pytest.mark.timeout(1200)  # the first one waits for the whole run
@pytest.mark.parametrize("name", sorted(TWINS))
def test_twin_is_caught(failures, name):
    assert TWINS[name].caught_by, "a twin must name the test that catches it"
    assert failures[name] == dict.fromkeys(TWINS[name].caught_by, True)


def test_there_are_twins():
    assert len(TWINS) > 40

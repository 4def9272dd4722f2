"""The kit must fail on every broken twin, in the tests that the twin names; and pass on what they are twins of."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtier.testing.backends import BackendConformance, JournalConformance
from kvtier.testing.memory import ExpiringMemoryBackend, MemoryBackend
from kvtier.testing.memory_journal import MemoryJournalBackend

SUITE = Path(__file__).with_name("twin_suite.py")
ROOT = SUITE.parent.parent.parent


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


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Names of the failed tests per class, from one run of the suite in its own process."""
    report = tmp_path_factory.mktemp("twins") / "report.xml"
    nodes = [f"{SUITE}::Test{name}::{test}" for name, twin in TWINS.items() for test in twin.caught_by]
    # a twin that hangs is caught too, long before the suite around it would lose patience
    options = ["-p", "no:cacheprovider", "-o", "timeout=60", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", "-q", *options, *nodes]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert report.exists(), run.stdout + run.stderr
    failed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        of_twin = failed.setdefault(name, {})
        test = case.attrib["name"].partition("[")[0]
        of_twin[test] = of_twin.get(test, False) or case.find("failure") is not None
    return failed


@pytest.mark.timeout(1200)  # the first one waits for the whole run
@pytest.mark.parametrize("name", sorted(TWINS))
def test_twin_is_caught(failures, name):
    assert TWINS[name].caught_by, "a twin must name the test that catches it"
    assert failures[name] == dict.fromkeys(TWINS[name].caught_by, True)


def test_there_are_twins():
    assert len(TWINS) > 40

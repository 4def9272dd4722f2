"""A third party's package, installed as a wheel: found by its entry point. (Its tests: the page about writing one.)"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "tests" / "plugin_package"

FIND = """
import sys
from importlib.metadata import entry_points

from kvtier.backends.base import Backend
from kvtier.registry import Registry

(entry,) = [entry for entry in entry_points(group="kvtier.backends") if entry.name == "dict-memory"]
assert entry.dist.name == "kvtier-dict-backend", entry.dist
registry = Registry("kvtier.backends", Backend)
assert "dict-memory" in registry.names()
assert "kvtier_dict_backend" not in sys.modules, "names() imported a plug-in"
print(registry.load("dict-memory"))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the package is installed: a directory of its own, beside the environment that runs this test."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("target")
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(target), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return target


def run_beside(installed, *arguments):
    paths = os.pathsep.join([str(installed), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_backend_is_found_by_its_entry_point(installed):
    run = run_beside(installed, "-c", FIND)
    assert run.stdout.strip() == "<class 'kvtier_dict_backend.DictBackend'>", run.stderr


def test_without_the_package_it_is_unknown(tmp_path):
    run = run_beside(tmp_path, "-c", FIND)
    assert run.returncode != 0
    assert "ValueError: not enough values to unpack" in run.stderr

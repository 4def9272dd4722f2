"""The programs in `examples/` run from beginning to end, as a reader would start them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, folder):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_serving_loop_stays_right_while_a_tier_is_gone(tmp_path):
    output = run("serving_loop.py", tmp_path)
    assert "every answer was right" in output
    assert "error in shelf" in output or "degraded in shelf" in output


def test_cancelled_clients_hurt_nobody(tmp_path):
    output = run("cancelled_clients.py", tmp_path)
    assert " 0 failed" in output
    assert "0 reads left over, 0 bytes leased" in output


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_run(path):
    tests = [Path(__file__), *(Path(__file__).parents[1] / "examples").glob("*.py")]
    assert path.name.startswith("toy_") or any(path.name in test.read_text() for test in tests)

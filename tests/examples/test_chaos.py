"""`examples/chaos.py` on a tiny model: all that it promises is seen, and a broken promise would be noticed."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.servers.redis_servers import redis_program, valkey_program

CHAOS = Path(__file__).parents[2] / "examples" / "chaos.py"


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_every_token_is_right_whatever_breaks(tmp_path):
    if not (valkey_program() or redis_program()):
        pytest.skip("no Redis server here")
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--tiny"], capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for seen in ("redis is DOWN", "redis is up again", "corrupt 1 ", "192 of 192 tokens", "local-disk: corrupt 1"):
        assert seen in done.stdout, done.stdout

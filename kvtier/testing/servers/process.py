"""One server as a child process: started until it answers, killed, frozen, started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

# The kernel ends the server with the process that started it, however that dies; Linux alone has that.
_TIE = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"  # it died before we asked
    "os.execv(sys.argv[2], sys.argv[3:])"
)
START_SECONDS = 60.0  # a machine that is six times slower, with other work on it
END_SECONDS = 10.0
POLL_SECONDS = 0.02


class ServerDiedError(RuntimeError):
    """The server ended instead of answering; the message carries the end of its log."""


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Tell whether somebody accepts connections on a loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def tied(command: Sequence[str], executable: str | None = None) -> list[str]:
    """Return the command line that runs `command` in a process which ends with this one, however that ends.

    Start it in the main thread: the kernel counts the end of the starting thread.

    Args:
        command: the program and its arguments.
        executable: the file to run, if it is not the command's first word.
    """
    program = executable or shutil.which(command[0])
    if sys.platform != "linux" or program is None:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), program, *command]


class ServerProcess:
    """A server program; use it as a context manager. It ends with this process, however that ends.

    Args:
        command: the program and its arguments.
        log: a file that takes what the server prints.
        ready: tells whether it answers now.
        executable: the file to run, if it is not the command's first word.
        environment: of the server; this process's if not given.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        ready: Callable[[], bool],
        executable: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command: list[str] = list(command)
        self.log = log
        self._ready = ready
        self._executable = executable
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 while it does not run."""
        return self._child.pid if self._child is not None else 0

    def start(self) -> None:
        """Start and return once it answers.

        Raises:
            ServerDiedError: it ended instead, or did not answer within a minute.
        """
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        """Start without waiting for an answer."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(  # noqa: S603  # a program that the test names
                tied(self.command, self._executable),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    def wait_ready(self) -> None:
        """Return once it answers; raises `ServerDiedError` as `start` does."""
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._child is None or self._child.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerDiedError(
                    f"{self.command[0]} did not start: {self.log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def freeze(self) -> None:
        """Stop it by SIGSTOP: it keeps its connections and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it in an orderly way; kill it if that takes too long."""
        if self._child is None:
            return
        self._child.send_signal(signal.SIGCONT)
        self._child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(END_SECONDS)
        self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

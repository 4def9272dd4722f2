"""Every transcript of a console in the documentation is what happens; `make newcomer` does what is left out here."""

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.docs.transcript import PAGES, ROOT, Command, File, Shell, follow, matches, run_here, steps

SHOWN = [page for page in PAGES if any(isinstance(step, Command) for step in steps(page.read_text()))]
LEFT_OUT = (
    "python3 -m venv",
    ". environment/bin/activate",
    "pip install --quiet './kvtier",
    "pip install --quiet pytest",
    "kvtier simulate",  # ten seconds
)
INSTALLS = {"write-a-backend.md"}  # for the programs that are started after it, not for this process


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def environment(tmp_path):
    """This interpreter and its programs first; pip installs into a folder, from what is on this machine."""
    installed = tmp_path / "installed"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVTIER_", "PIP_", "PYTEST_"))}
    return {
        **kept,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)]),
        "PIP_TARGET": str(installed),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say "none"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider -p no:xdist --strict-markers -W error "
        "-o asyncio_default_fixture_loop_scope=function",
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=name_of)
def test_every_transcript_is_what_happens(page, environment, tmp_path, monkeypatch, capfd):
    for name in ("KVTIER_CONFIG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    home = tmp_path / "home"
    home.mkdir()
    shell = Shell(home, environment, in_process=None if page.name in INSTALLS else run_here(capfd, monkeypatch))
    try:
        follow(
            page.read_text(),
            shell,
            skip=lambda line: line.startswith(LEFT_OUT),
            replace={"9464": str(free_port())},
        )
    finally:
        shell.close()


def test_pages_with_transcripts_are_found():
    assert {"command-line.md", "tutorial.md", "write-a-backend.md"} <= {page.name for page in SHOWN}


def test_a_transcript_that_is_wrong_is_noticed(tmp_path):
    assert matches(["a", "...", "d"], "a\nb\nc\nd\n")
    assert not matches(["a", "...", "d"], "a\nb\nc\n")
    assert not matches(["a.b"], "axb\n")
    assert matches(["3 b, ... in c..."], "3 b,\n  4 in cd")
    assert not matches(["3 b, ... in c"], "3 b, 4 on c")
    page = '```console\n$ one\nsaid\n$ two\n```\n\n```toml title="f/x.toml"\na = 1\n```\n'
    assert steps(page) == [Command("one", ("said",)), Command("two", ()), File("f/x.toml", "a = 1\n")]
    shell = Shell(tmp_path, dict(os.environ))
    follow("```console\n$ mkdir x && cd x\n$ export A=b\n$ echo $A; basename $PWD\nb\nx\n```", shell)
    with pytest.raises(AssertionError, match="the page shows"):
        follow("```console\n$ echo a\nb\n```", shell)

"""A newcomer: a clean clone, a fresh environment, and nothing but README and docs. `make newcomer` runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_console import SHOWN, free_port, name_of
from tests.docs.transcript import ROOT, Command, Shell, fences, follow

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("KVTIER_NEWCOMER"), reason="installs everything anew; `make newcomer` runs it"
    ),
    pytest.mark.timeout(1800),
]
ENVIRONMENT = re.compile(r"KVTIER_|PIP_(TARGET|NO_|USER|PREFIX|ROOT)|PYTHON|PYTEST_|VIRTUAL_ENV|MAKE")
OTHERS = [page for page in SHOWN if page.name not in ("tutorial.md", "write-a-backend.md")]


def python_of(page):
    """Return the page's Python as a program that a reader would paste together."""
    blocks = fences((ROOT / page).read_text())
    return "\n".join(body for language, rest, body in blocks if language == "python" and not rest)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(home / "kvtier")], check=True)
    programs = home / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.base_prefix, "bin", Path(sys.executable).resolve().name))
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != str(Path(sys.executable).parent)]
    kept = {key: value for key, value in os.environ.items() if not ENVIRONMENT.match(key)}
    shell = Shell(
        home,
        {
            **kept,
            "PATH": os.pathsep.join([str(programs), *path]),
            "PIP_CONSTRAINT": str(home / "kvtier" / "constraints.txt"),  # the versions that are known to work
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "KVTIER_CACHE_DIR": str(home / "cache"),
            "OMP_WAIT_POLICY": "PASSIVE",
        },
    )
    yield shell
    shell.close()


def do(shell, line):
    said = shell.run(Command(f"{{ {line}\n}} && echo it went well", ()))
    assert said.endswith("it went well\n"), said
    return said


def test_1_the_tutorial(shell):
    follow((ROOT / "docs" / "tutorial.md").read_text(), shell, replace={"9464": str(free_port())})
    where = do(shell, "python -c 'import kvtier; print(kvtier.__file__)'")
    assert "environment/lib" in where  # neither the clone nor another installation


def test_2_a_backend_of_ones_own(shell):
    follow((ROOT / "docs" / "how-to" / "write-a-backend.md").read_text(), shell)
    assert "dict-memory" in do(shell, "kvtier config schema")


@pytest.mark.parametrize("page", OTHERS, ids=name_of)
def test_3_every_other_transcript(shell, page):
    do(shell, f"mkdir ~/{page.stem} && cd ~/{page.stem}")
    follow(page.read_text(), shell, replace={"9464": str(free_port())})


@pytest.mark.parametrize(
    "page", ["README.md", "docs/quickstart.md", "docs/how-to/own-loop.md", "docs/how-to/metrics.md"]
)
def test_4_pages_that_are_programs(shell, page):
    do(shell, 'mkdir -p ~/third && cd ~/third && pip install --quiet "$HOME/kvtier[transformers]"')
    (shell.folder / "program.py").write_text(python_of(page))
    do(shell, "python program.py")


def test_5_what_is_missing_is_said(shell):
    """Without an extra, each thing that needs it names the command that installs it."""
    do(shell, "cd ~ && python3 -m venv bare && bare/bin/pip install --quiet --no-deps ./kvtier")
    assert "kvtier[cli]" in do(shell, "bare/bin/kvtier doctor; test $? = 2")

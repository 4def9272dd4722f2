"""What the pages show a reader doing at a shell: files to write, commands to type, and what they say; and doing it.

```console          a command after each "$ ", then what it prints; "..." stands for any text
```toml title="f"   a file to write, in whatever language, under the name in its title
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli import app as commands

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\s`]*) *(?P<rest>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
TITLE = re.compile(r'title="([^"]+)"')
SHELL = re.compile(r"[|;&<>*~$`]")


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    shown: tuple[str, ...]


def fences(text):
    """Return (language, the rest of its first line, body) for each block of a page."""
    return [(found["language"], found["rest"], found["body"]) for found in FENCE.finditer(text)]


def steps(text):
    """Return a page's files and commands, in its order."""
    found = []
    for language, rest, body in fences(text):
        if title := TITLE.search(rest):
            found.append(File(title[1], body))
        elif language == "console":
            lines = []
            for line in body.splitlines():
                if line.startswith("$ "):
                    lines.append((line[2:], []))
                else:
                    lines[-1][1].append(line)
            found += [Command(line, tuple(shown)) for line, shown in lines]
    return found


def matches(shown, said):
    """Tell whether output is what is shown; where it is wrapped depends on the lengths of paths, and does not count."""
    pattern = re.escape(" ".join(" ".join(shown).split())).replace(r"\.\.\.", ".*")
    pattern = re.sub(r"(\\ )?\.\*(\\ )?", ".*", pattern)
    return re.fullmatch(pattern, " ".join(said.split())) is not None


class Shell:
    """Does the steps one after the other as a shell would: folder and environment stay, `&` runs beside."""

    def __init__(self, home, environment, *, in_process=None):
        """Begin in `home`; `in_process(words)` runs a `kvtier` command in this process, and returns what it says."""
        self.folder = home
        self.environment = {**environment, "HOME": str(home), "COLUMNS": "80"}
        self._state = home / ".state"
        self._in_process = in_process
        self._beside = []

    def write(self, file):
        path = self.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)

    def run(self, command):
        """Return what a command prints, both streams together."""
        line = command.line
        if re.fullmatch(r"kill( -9)? %1", line):
            return self._kill(self._beside.pop(), signal.SIGKILL if "-9" in line else signal.SIGTERM)
        if line.endswith("&"):
            self._beside.append(self._start(line.removesuffix("&")))
            return ""
        if self._in_process and line.startswith("kvtier ") and not SHELL.search(line):
            with contextlib.chdir(self.folder):
                return self._in_process(shlex.split(line))
        after = f"\nstatus=$?; pwd > {self._state}; env -0 >> {self._state}; exit $status"
        done = self._start(line + after)
        said, _ = done.communicate(timeout=900)
        folder, _, environment = self._state.read_text().partition("\n")
        self.folder = Path(folder)
        self.environment = dict(pair.split("=", 1) for pair in environment.split("\0") if pair)
        return said

    def close(self):
        while self._beside:
            self._kill(self._beside.pop(), signal.SIGKILL)

    def _start(self, line):
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @staticmethod
    def _kill(process, how):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        said, _ = process.communicate(timeout=60)
        return said


def follow(text, shell, *, skip=lambda _line: False, replace=None):
    """Do a page's steps; complain about the first command that does not say what the page shows."""
    for old, new in (replace or {}).items():
        text = text.replace(old, new)
    for step in steps(text):
        if isinstance(step, File):
            shell.write(step)
        elif step.line.startswith("cat ") and step.shown:  # a file that the reader has written
            shell.write(File(step.line.removeprefix("cat "), "\n".join(step.shown) + "\n"))
        elif not skip(step.line):
            said = shell.run(step)
            assert matches(step.shown, said), f"$ {step.line}\n{said}\n--- the page shows\n" + "\n".join(step.shown)


def run_here(capfd, monkeypatch):
    """Return a function that runs `kvtier ...` in this process and gives back what it prints."""

    def call(words):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", words)
        with contextlib.suppress(SystemExit):
            commands.run()
        said = capfd.readouterr()
        return said.out + said.err

    return call

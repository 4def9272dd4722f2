"""A config file with a disk tier in a folder of the test, and the command line called as `kvtier` calls it."""

import json
import sys

import pytest

from kvtier.cli import app as commands


class Said:
    """What a command printed, and its exit status."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def text(self):
        """Both streams as one line, however they were wrapped."""
        return " ".join((self.out + " " + self.err).split())


@pytest.fixture
def kvtier(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "default"))
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["kvtier", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            commands.run()
        said = capfd.readouterr()
        return Said(end.value.code or 0, said.out, said.err)

    return call


@pytest.fixture
def write_config(tmp_path):
    """Write `kvtier.toml` into the working directory of the commands."""

    def write(text):
        path = tmp_path / "kvtier.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def on_disk(write_config, tmp_path):
    """Return the disk tier's folder, with a memory tier above it in the config."""
    write_config(
        f"""
        [namespace]
        model = "org/name"
        revision = "1"
        [[tiers]]
        backend = "pinned-cpu"
        capacity = "64MiB"
        [[tiers]]
        backend = "local-disk"
        path = "{tmp_path}/entries"
        capacity = "1GiB"
        """
    )
    return tmp_path / "entries"


@pytest.fixture
def stored_files(on_disk):
    """Return the files of the entries, sorted by name."""
    return lambda: sorted((on_disk / "entries").glob("*/*/*"), key=lambda path: path.name)

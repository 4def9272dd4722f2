"""Numba's kernels as numba sees them."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("numba")

from kvtier.codecs import _numba


def kernels():
    """Make all kernels, compile none."""
    found = [make(32, 12345) for make in _numba._CHANNELS.values()]
    found += [make(64, 64, 12345) for make in _numba._TOKENS.values()]
    return found + [make(12345) for make in _numba._SPLIT.values()]


def test_kernels_hold_nothing_but_numbers():
    """Else numba's cache on disk would miss in every new process, and grow."""
    for kernel in kernels():
        for cell in kernel.__closure__:
            assert type(cell.cell_contents) is int, f"{kernel.__name__} holds {cell.cell_contents!r}"


def test_kernels_hold_what_they_were_made_from():
    """Else numba's cache would give a new version the kernels of the one before, which lie where it is installed."""
    for kernel in kernels():
        assert 12345 in [cell.cell_contents for cell in kernel.__closure__], kernel.__name__


def test_any_changed_source_changes_what_kernels_are_made_from(tmp_path):
    shutil.copytree(Path(_numba.__file__).parent, tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["__pycache__"])
    assert _numba.digest_of(tmp_path) == _numba.SOURCES
    for file in tmp_path.glob("*.py"):
        before = file.read_bytes()
        file.write_bytes(before + b"# changed")
        assert _numba.digest_of(tmp_path) != _numba.SOURCES, file.name
        file.write_bytes(before)

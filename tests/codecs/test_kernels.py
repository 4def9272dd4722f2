"""Numba's kernels as numba sees them."""

import pytest

pytest.importorskip("numba")

from kvtier.codecs import _numba


def test_kernels_hold_nothing_but_numbers():
    """Else numba's cache on disk would miss in every new process, and grow."""
    kernels = [make(32) for make in _numba._CHANNELS.values()] + [make(64, 64) for make in _numba._TOKENS.values()]
    for kernel in kernels:
        for cell in kernel.__closure__:
            assert type(cell.cell_contents) is int, f"{kernel.__name__} holds {cell.cell_contents!r}"

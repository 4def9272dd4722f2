"""Torch's operations kept on the calling thread, without touching the process's thread settings."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def _find_setter() -> Callable[[int], None] | None:
    """Return `omp_set_num_threads` of the OpenMP runtime that torch itself uses, or `None` if it has none."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            setter = ctypes.PyDLL(str(library)).omp_set_num_threads  # looked up in what the library depends on
        except (OSError, AttributeError):
            continue
        setter.argtypes, setter.restype = (ctypes.c_int,), None
        return setter
    return None


_set_threads = _find_setter()


def copy_on_this_thread(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Do `target.copy_(source)` for each pair on the calling thread alone, in one call without the GIL.

    A copy split over torch's intra-op threads ends when the slowest of them ends: where other work keeps the cores
    busy, a copy of 16 MiB took 14 times as long as on one thread. The store's own threads run copies side by side
    instead. `torch.set_num_threads` would change the whole process; OpenMP's setting is the thread's own.
    """
    on_this_thread(lambda: torch._foreach_copy_(targets, sources))  # torch's own optimisers use it


def on_this_thread(job: Callable[[], T]) -> T:
    """Call `job` with torch's operations kept on the calling thread; return its result."""
    threads = torch.get_num_threads()  # also makes torch set up this thread, which would undo what follows
    if threads == 1 or _set_threads is None:
        return job()
    _set_threads(1)
    try:
        return job()
    finally:
        _set_threads(threads)

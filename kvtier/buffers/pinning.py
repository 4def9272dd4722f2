"""Registers host memory with CUDA, so that devices copy to and from it directly; or locks it; or does nothing."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# One registration above about 96 GiB fails on some hosts, and no copy may cross the border of two registrations.
PIECE = 16 << 30
LOCK_PIECE = 256 << 20  # locked at a time: closing waits that long
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for the contexts of all devices
_log = logging.getLogger("kvtier.buffers")


class Pinning:
    """The registration of [address, address + size) with CUDA, piece by piece; else, with `lock`, in RAM by `mlock`.

    `wanted`: None registers if torch is loaded by now and sees a device, True loads torch for it, False never does.
    Construct it in the thread whose current device is to be used.
    """

    def __init__(self, address: int, size: int, *, wanted: bool | None, lock: bool = False) -> None:
        self.done: bool = False
        self.locked: bool = False
        self._range = (address, size)
        self._lock = lock
        self._wanted = wanted is True or (wanted is None and "torch" in sys.modules)
        self._explicit = wanted is True
        self._pieces = [(address + start, min(PIECE, size - start)) for start in range(0, size, PIECE)]
        self._registered: list[int] = []
        self.device: int | None = _current_device() if self._wanted and "torch" in sys.modules else None

    def run(self, stopped: Callable[[], bool]) -> None:
        """Register everything, or nothing if that fails (logged). Takes seconds: for a thread that ends soon.

        CUDA keeps its last error per thread, so that a failure here cannot surface in a caller's next kernel launch.
        """
        if self._wanted:
            self._try_cuda(stopped)
        if self._lock and not self.done:
            self._try_mlock(stopped)

    def _try_cuda(self, stopped: Callable[[], bool]) -> None:
        try:
            self._register(stopped)
        except Exception as exc:  # noqa: BLE001  # torch and CUDA raise what they like; memory works without pinning
            _log.warning("host memory is not pinned: %s", exc)
        if not self.done:
            self.undo()

    def _try_mlock(self, stopped: Callable[[], bool]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = self._range
        for start in range(0, size, LOCK_PIECE):
            length = min(LOCK_PIECE, size - start)
            if stopped() or libc.mlock(ctypes.c_void_p(address + start), ctypes.c_size_t(length)) != 0:
                reason = "closed" if stopped() else os.strerror(ctypes.get_errno())
                _log.warning("host memory is not locked: %s (see `ulimit -l`)", reason)
                libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(start))
                return
        self.locked = True

    def undo(self) -> None:
        """Unregister what is registered; must come before the memory is unmapped, which unlocks it."""
        self.done = False
        if not self._registered:
            return
        import torch  # noqa: PLC0415  # loaded already: something was registered

        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it without types
        while self._registered:
            address = self._registered.pop()
            status = int(runtime.cudaHostUnregister(address))
            if status != 0:
                _log.warning("cudaHostUnregister: error %d", status)

    def _register(self, stopped: Callable[[], bool]) -> None:
        import torch  # noqa: PLC0415  # heavy, and only wanted with CUDA

        if not torch.cuda.is_available():
            if self._explicit:
                _log.warning("host memory is not pinned: torch sees no CUDA device")
            return
        with torch.cuda.device(torch.cuda.current_device() if self.device is None else self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it without types
            for address, size in self._pieces:
                if stopped():
                    return
                status = int(runtime.cudaHostRegister(address, size, _PORTABLE))
                if status != 0:
                    raise RuntimeError(f"cudaHostRegister of {size} bytes: error {status}")
                self._registered.append(address)
        self.done = True


def _current_device() -> int | None:
    """Return this thread's CUDA device if torch has begun to use CUDA."""
    import torch  # noqa: PLC0415  # loaded already

    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it without types
    return torch.cuda.current_device() if begun else None

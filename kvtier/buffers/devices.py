"""Streams and events of a device, as few of them as copies need; host memory has the same, and is always done."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait in this thread until the work before the point is done."""

    def query(self) -> bool:
        """Tell whether it is done."""


class Stream(Protocol):
    """Work done in order, beside other streams and beside the host."""

    def run(self, work: Callable[[], object]) -> None:
        """Put `work` (copies and kernels, which return before they are done) at the stream's end."""

    def record(self) -> Event:
        """Return the point behind everything put in so far."""

    def wait(self, event: Event) -> None:
        """Have later work wait for `event`, wherever that was recorded; the host does not wait."""


class Device(Protocol):
    """Where memory lies, and who works on it."""

    torch_device: torch.device

    def stream(self) -> Stream:
        """Return a new stream."""

    def current(self, stream: object = None) -> Stream:
        """Return the caller's stream: the one given, else this thread's current one."""

    def empty(self, size: int) -> torch.Tensor:
        """Return `size` bytes of the device's memory, of undefined content, that any of its streams may use."""


class _DoneEvent:
    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Everything is done."""
        return True


class HostStream:
    """Does everything at once."""

    def run(self, work: Callable[[], object]) -> None:
        """As the contract says."""
        work()

    def record(self) -> Event:
        """As the contract says."""
        return _DoneEvent()

    def wait(self, event: Event) -> None:
        """As the contract says."""
        event.synchronize()


class HostDevice:
    """Host memory in place of a device's: the same code, on any machine."""

    def __init__(self) -> None:
        self.torch_device: torch.device = torch.device("cpu")

    def stream(self) -> Stream:
        """As the contract says."""
        return HostStream()

    def current(self, stream: object = None) -> Stream:
        """As the contract says; whatever stream is given, nothing is under way."""
        del stream
        return HostStream()

    def empty(self, size: int) -> torch.Tensor:
        """As the contract says."""
        return torch.empty(size, dtype=torch.uint8)


class CudaStream:
    """A CUDA stream. Not yet run on a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        """As the contract says."""
        with self._current():
            work()

    def _current(self) -> AbstractContextManager[object]:
        if self._stream == torch.cuda.current_stream(self._stream.device):
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        """As the contract says; the event blocks in the driver instead of spinning."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it without types
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        """As the contract says."""
        if isinstance(event, torch.cuda.Event):
            self._stream.wait_event(event)
        else:  # another device's: the host has to wait
            event.synchronize()


class CudaDevice:
    """One CUDA device. Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        self.torch_device: torch.device = torch.device("cuda", index)

    def stream(self) -> Stream:
        """As the contract says."""
        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def current(self, stream: object = None) -> Stream:
        """As the contract says."""
        if isinstance(stream, torch.cuda.Stream):
            return CudaStream(stream)
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def empty(self, size: int) -> torch.Tensor:
        """As the contract says: memory that is not given back before its owner, whichever stream used it."""
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)


def device_of(name: str | torch.device) -> Device:
    """Return a device by torch's name for it.

    Raises:
        ConfigError: torch does not know it, or sees no such device on this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r}: torch knows no such device; write 'cuda', 'cuda:1' or 'cpu'") from None
    if device.type == "cpu":
        return HostDevice()
    if device.type != "cuda":
        raise ConfigError(f"device {str(name)!r}: only 'cuda', 'cuda:<number>' and 'cpu' are supported")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {str(name)!r}: torch {torch.__version__} sees no CUDA device on this machine")
    if str(device) != "cuda" and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device {str(name)!r}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return CudaDevice(device)

"""Entries kept in the memory of a CUDA device. Not yet run on a GPU; `device="cpu"` runs the same code anywhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend, Stat, TooLongError, Traits, Written, check_name
from kvtier.backends.batches import answer_each
from kvtier.backends.device_slots import DeviceEntry, SlotPool, cut, pairs
from kvtier.backends.listing import stat_pages
from kvtier.errors import BackendError, BackendUnavailableError, CapacityError, ClosedError, ConfigError
from kvtier.options import Size  # noqa: TC001  # the config reads the annotation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import torch

    from kvtier.backends.base import BackendContext, Buffer, Read, Write
    from kvtier.buffers.devices import Device, Event, Stream

SLOT_BYTES = 64 << 10
SPARE = 16  # one slot for so many comes on top of the capacity, because entries end inside a slot


class CudaBackend(Backend):
    """A tier of fixed slots in a device's memory, allocated once at open, with streams of its own.

    Copies between the store's registered host memory and the device run beside the model's kernels; a thread of the
    tier waits for the event behind each, the loop never does. Buffers may lie in host memory or on the device.

    Args:
        device: "cuda", "cuda:1", ...; "cpu" keeps the entries in plain host memory, for tests without a GPU.
        slot_bytes: size of a slot; an entry takes as many as it needs. Entries shorter than eight slots waste more than
            the sixteenth that is allocated beyond `capacity`: let slots be smaller then.
        donate: a write of one contiguous tensor that lies on the device already is kept as it is, without a copy: the
            writer gives it away and must not write to it again.
    """

    traits: Traits = Traits(accepts=frozenset({"host", "cuda"}), ranges=True)

    def __init__(self, *, device: str = "cuda", slot_bytes: Size = SLOT_BYTES, donate: bool = False) -> None:
        if slot_bytes < 1:
            raise ConfigError(f"slot_bytes={slot_bytes}: must be at least one byte")
        self._device_name = device
        self._slot_bytes = slot_bytes
        self._donate = donate
        self._context: BackendContext | None = None
        self._entries: dict[str, DeviceEntry] = {}

    def _make_device(self) -> Device:
        from kvtier.buffers.devices import device_of  # noqa: PLC0415  # only an open backend needs torch

        return device_of(self._device_name)

    async def open(self, context: BackendContext) -> None:
        """Allocate the slots.

        Raises:
            ConfigError: no such device, or open already.
            BackendUnavailableError: the device has no memory for `capacity`.
        """
        if self._context is not None:
            raise ConfigError("this cuda backend is open already; one backend belongs to one tier")
        self._device = await context.workers.run(self._make_device)
        count = -(-context.capacity // self._slot_bytes)
        count += count // SPARE + 1
        try:
            memory = await context.workers.run(self._device.empty, count * self._slot_bytes)
        except RuntimeError as exc:  # torch's own out-of-memory error is one
            raise BackendUnavailableError(
                f"no {count * self._slot_bytes} bytes on {self._device_name!r}: {exc}"
            ) from exc
        self._pool = SlotPool(memory, self._slot_bytes)
        self._streams = {"in": self._device.stream(), "out": self._device.stream()}
        self._context = context

    # --- reading

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """As the contract says; an entry that is replaced meanwhile is copied out whole all the same."""
        self._use()
        for read in reads:
            check_name(read.name)
            self._check(read.into, writable=True)
        return await answer_each(self._read, reads)

    async def _read(self, read: Read) -> int | None:
        entry = self._entries.get(read.name)
        if entry is None:
            return None
        into = self._flat(read.into)
        wanted, room = max(0, entry.size - read.offset), sum(tensor.numel() for tensor in into)
        if wanted > room and not read.partial:
            raise TooLongError(entry.size)
        wanted = min(wanted, room)
        entry.retain()  # its slots are used for nothing else before the copy is done
        try:
            copies = pairs(into, cut(entry.pieces, read.offset, wanted))
            await self._use().workers.run(self._copy, self._streams["out"], copies, self._consumer(into))
        finally:
            self._release(entry)
        return wanted

    # --- writing

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """As the contract says; an entry for which no slots are free is answered with `CapacityError`."""
        self._use()
        for write in writes:
            check_name(write.name)
            self._check(write.parts, writable=False)
        return await answer_each(self._write, writes)

    async def _write(self, write: Write) -> Written:
        present = self._entries.get(write.name)
        if write.if_absent and present is not None:
            return Written(present.size, stored=False)
        if any(isinstance(part, memoryview) and part.readonly for part in write.parts):
            parts = await self._use().workers.run(self._flat, write.parts)  # copies it: torch takes no read-only memory
        else:
            parts = self._flat(write.parts)
        made = self._consumer(parts)
        if self._donate and len(parts) == 1 and self._is_own(write.parts[0]):
            entry = self._adopted(parts[0], write.expires)
        else:
            entry = self._new_entry(parts, write.expires)
        try:
            copies = [] if entry.pieces and entry.pieces[0] is parts[0] else pairs(entry.pieces, parts)
            await self._use().workers.run(self._copy, self._streams["in"], copies, made)
            present = self._entries.get(write.name)  # another write may have come first
            if write.if_absent and present is not None:
                self._release(entry)
                return Written(present.size, stored=False)
            self._use()
        except BaseException:
            self._release(entry)
            raise
        self._entries[write.name] = entry
        if present is not None:
            self._release(present)
        return Written(entry.size)

    def _adopted(self, tensor: torch.Tensor, expires: float | None) -> DeviceEntry:
        return DeviceEntry([tensor], tensor.numel(), expires, self._use().clock.wall())

    def _new_entry(self, parts: Sequence[torch.Tensor], expires: float | None) -> DeviceEntry:
        size = sum(part.numel() for part in parts)
        slots = self._pool.take(size)
        if slots is None:
            raise CapacityError(f"no free slots for an entry of {size} bytes; {self._pool.free} are left")
        return DeviceEntry(self._pool.pieces(slots, size), size, expires, self._use().clock.wall(), slots)

    def _release(self, entry: DeviceEntry) -> None:
        entry.holders -= 1
        if not entry.holders:
            self._pool.give(entry.slots)
            entry.slots, entry.pieces = (), ()

    @staticmethod
    def _copy(stream: Stream, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], made: Event | None) -> None:
        """Put the copies on a stream behind what the caller's stream does, and wait for them: called in a thread."""
        if made is not None:
            stream.wait(made)
        for target, source in copies:
            stream.run(partial(target.copy_, source, non_blocking=True))
        stream.record().synchronize()

    def _consumer(self, buffers: Sequence[torch.Tensor]) -> Event | None:
        """Return the caller's point on its own stream where a buffer is device memory, which it may still work on."""
        if any(buffer.device.type != "cpu" for buffer in buffers) or self._device.torch_device.type == "cpu":
            return self._device.current().record()
        return None

    def _is_own(self, buffer: Buffer) -> bool:
        """Tell whether a buffer is a tensor on this device."""
        return not isinstance(buffer, memoryview) and buffer.device.type == self._device.torch_device.type

    def _check(self, buffers: Sequence[Buffer], *, writable: bool) -> None:
        """Raise `InvalidValueError` if one of the buffers cannot be copied from or to."""
        from kvtier.backends.device_views import check_buffer  # noqa: PLC0415  # only an open backend needs torch

        for buffer in buffers:
            check_buffer(buffer, self._device.torch_device, writable=writable)

    @staticmethod
    def _flat(buffers: Sequence[Buffer]) -> list[torch.Tensor]:
        """Return the buffers, which were checked, as one-dimensional tensors of bytes."""
        from kvtier.backends.device_views import flat_tensor  # noqa: PLC0415  # only an open backend needs torch

        return [flat_tensor(buffer) for buffer in buffers]

    # --- the rest of the contract

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """As the contract says; slots are free once no copy from them is under way."""
        self._use()
        return [self._drop(check_name(name)) for name in names]

    def _drop(self, name: str) -> bool:
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._release(entry)
        return True

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """As the contract says."""
        self._use()
        return [self._stat(check_name(name)) for name in names]

    def _stat(self, name: str) -> Stat | None:
        entry = self._entries.get(name)
        return None if entry is None else Stat(name, entry.size, entry.expires, entry.changed)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """As the contract says, in the order of names."""
        self._use()
        async for page in stat_pages(self._entries, after, self.stat_many):
            yield page

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Note the expiry, which `stat_many` and `scan` report."""
        now = self._use().clock.wall()
        for name, expires in items:
            entry = self._entries.get(check_name(name))
            if entry is not None:
                entry.expires, entry.changed = expires, now

    async def aclose(self) -> None:
        """Give the device's memory back."""
        self._context = None
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            self._release(entry)

    def _use(self) -> BackendContext:
        if self._context is None:
            raise ClosedError("this cuda backend is not open")
        return self._context

"""Pinning against a stand-in for CUDA that keeps the driver's rules: no overlap, unregister what was registered."""

import contextlib
import logging
import sys
import types
from pathlib import Path

import pytest

from kvtier.buffers import Arena
from kvtier.buffers import pinning as pinning_module
from kvtier.buffers.pinning import Pinning

MIB = 1 << 20


class Driver:
    def __init__(self, *, fail_at=None):
        self.registered = {}
        self.calls = []
        self.fail_at = fail_at

    def cudaHostRegister(self, address, size, flags):
        self.calls.append(("register", address, size, flags))
        if self.fail_at is not None and len(self.registered) == self.fail_at:
            return 2  # out of memory
        assert all(address + size <= a or a + s <= address for a, s in self.registered.items())
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0 if self.registered.pop(address, None) else 713


def fake_torch(driver, *, available=True, begun=True, current=3):
    devices = []

    @contextlib.contextmanager
    def device(index):
        devices.append(index)
        yield

    cuda = types.SimpleNamespace(
        is_available=lambda: available,
        is_initialized=lambda: begun,
        current_device=lambda: current,
        cudart=lambda: driver,
        device=device,
        used_devices=devices,
    )
    module = types.ModuleType("torch")
    module.cuda = cuda
    return module


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(driver))
    monkeypatch.setattr(pinning_module, "PIECE", 16 * MIB)
    return driver


def test_everything_is_registered_in_pieces_on_the_callers_device(driver):
    pinning = Pinning(0x10000, 40 * MIB, wanted=None)
    assert not pinning.done
    pinning.run(lambda: False)
    assert pinning.done
    assert driver.registered == {0x10000: 16 * MIB, 0x10000 + 16 * MIB: 16 * MIB, 0x10000 + 32 * MIB: 8 * MIB}
    assert {call[3] for call in driver.calls} == {1}  # portable: pinned for every context
    assert sys.modules["torch"].cuda.used_devices == [3]
    pinning.undo()
    assert driver.registered == {}
    assert not pinning.done
    pinning.undo()
    assert len(driver.calls) == 6


def test_a_failure_leaves_nothing_registered_and_is_logged(driver, caplog):
    driver.fail_at = 2
    pinning = Pinning(0, 40 * MIB, wanted=True)
    with caplog.at_level(logging.WARNING, logger="kvtier.buffers"):
        pinning.run(lambda: False)
    assert driver.registered == {}
    assert not pinning.done
    assert "not pinned" in caplog.text


def test_an_unregistration_that_fails_is_logged(driver, caplog):
    pinning = Pinning(0, 16 * MIB, wanted=None)
    pinning.run(lambda: False)
    driver.registered.clear()  # say, because the context is gone
    with caplog.at_level(logging.WARNING, logger="kvtier.buffers"):
        pinning.undo()
    assert "error 713" in caplog.text


def test_a_close_in_the_middle_stops_it(driver):
    answers = iter([False, True])
    pinning = Pinning(0, 40 * MIB, wanted=None)
    pinning.run(lambda: next(answers))
    assert driver.registered == {}
    assert not pinning.done


def test_false_never_touches_torch(driver):
    pinning = Pinning(0, MIB, wanted=False)
    pinning.run(lambda: False)
    assert driver.calls == []


def test_none_does_not_load_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch.cuda", None)  # an import would fail loudly
    pinning = Pinning(0, MIB, wanted=None)
    pinning.run(lambda: False)
    assert "torch" not in sys.modules
    assert not pinning.done


@pytest.mark.parametrize(("wanted", "warned"), [(None, False), (True, True)])
def test_without_a_device_memory_stays_plain(monkeypatch, caplog, wanted, warned):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(driver, available=False, begun=False))
    pinning = Pinning(0, MIB, wanted=wanted)
    with caplog.at_level(logging.WARNING, logger="kvtier.buffers"):
        pinning.run(lambda: False)
    assert driver.calls == []
    assert ("no CUDA device" in caplog.text) is warned


def test_an_arena_registers_before_use_and_unregisters_before_it_goes(driver):
    arena = Arena(8 * MIB)
    arena._thread.join()
    assert arena.pinned
    assert arena.stats().pinned
    assert driver.registered == {arena.memory.address: 8 * MIB}
    slot = arena.try_allocate(1)
    assert arena.close() is False
    assert driver.registered  # somebody may still have a copy in flight
    slot.release()
    assert arena.close() is True
    assert driver.registered == {}
    assert not arena.pinned


class Libc:
    def __init__(self, *, refuse_at=None):
        self.calls = []
        self.refuse_at = refuse_at

    def mlock(self, address, length):
        self.calls.append(("lock", address.value, length.value))
        return -1 if len(self.calls) == self.refuse_at else 0

    def munlock(self, address, length):
        self.calls.append(("unlock", address.value, length.value))
        return 0


def test_memory_is_locked_where_it_cannot_be_registered(monkeypatch):
    libc = Libc()
    monkeypatch.setattr(pinning_module.ctypes, "CDLL", lambda *_, **__: libc)
    monkeypatch.setattr(pinning_module, "LOCK_PIECE", 4 * MIB)
    pinning = Pinning(1 << 30, 10 * MIB, wanted=False, lock=True)
    pinning.run(lambda: False)
    assert pinning.locked
    assert [(address - (1 << 30), length) for _, address, length in libc.calls] == [
        (0, 4 * MIB),
        (4 * MIB, 4 * MIB),
        (8 * MIB, 2 * MIB),
    ]


def test_memory_that_cannot_be_locked_whole_is_not_locked_at_all(monkeypatch, caplog):
    libc = Libc(refuse_at=2)
    monkeypatch.setattr(pinning_module.ctypes, "CDLL", lambda *_, **__: libc)
    monkeypatch.setattr(pinning_module, "LOCK_PIECE", 4 * MIB)
    pinning = Pinning(1 << 30, 10 * MIB, wanted=False, lock=True)
    pinning.run(lambda: False)
    assert not pinning.locked
    assert libc.calls[-1] == ("unlock", 1 << 30, 4 * MIB)
    assert "not locked" in caplog.text


def test_registered_memory_is_not_locked_as_well(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(Driver()))
    monkeypatch.setattr(pinning_module.ctypes, "CDLL", lambda *_, **__: pytest.fail("locked"))
    pinning = Pinning(1 << 30, MIB, wanted=None, lock=True)
    pinning.run(lambda: False)
    assert pinning.done
    assert not pinning.locked


def test_an_arena_says_whether_it_is_locked():
    arena = Arena(64 << 10, pin=False, lock=True)
    arena._thread.join()
    assert arena.stats().locked  # 64 KiB: within every limit
    assert arena.close()


@pytest.mark.parametrize(("huge_pages", "flag"), [(True, "hg"), (False, "nh")])
def test_huge_pages_are_asked_for_or_refused(huge_pages, flag):
    arena = Arena(4 * MIB, pin=False, huge_pages=huge_pages)
    begin, flags = f"{arena.memory.address:x}-", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(begin):
            flags = None
        elif flags is None and line.startswith("VmFlags:"):
            flags = line
    if not flags:
        pytest.skip("the kernel does not tell the flags of this mapping")
    assert flag in flags.split()
    assert arena.close()

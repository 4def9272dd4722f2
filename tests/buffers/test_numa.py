"""Memory nodes: read from a made-up /sys; the system call against the real kernel, which knows node 0."""

import logging
import mmap
import sys
import types

import pytest

from kvtier.buffers import Arena, numa
from kvtier.buffers.memory import HostMemory

MIB = 1 << 20


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """A machine with nodes 0 and 1, and a GPU beside the second."""
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/online").write_text("0-1\n")
    place = tmp_path / "bus/pci/devices/0000:17:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    monkeypatch.setattr(numa.nodes, "__defaults__", (tmp_path,))
    monkeypatch.setattr(numa.node_of_pci, "__defaults__", (tmp_path,))
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """What the kernel is asked for."""
    asked = []
    monkeypatch.setattr(numa, "prefer_node", lambda *arguments: asked.append(arguments) or True)
    return asked


def fake_gpu(monkeypatch):
    found = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    cuda = types.SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, get_device_properties=lambda _index: found
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


def test_nodes_are_read_in_every_form(tmp_path):
    assert numa.nodes(tmp_path) == [0]  # the system does not tell
    (tmp_path / "devices/system/node").mkdir(parents=True)
    for text, found in (("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3\n", [0, 2, 3]), ("\n", [0])):
        (tmp_path / "devices/system/node/online").write_text(text)
        assert numa.nodes(tmp_path) == found


def test_memory_lies_beside_the_gpu(two_nodes, asked, monkeypatch):
    fake_gpu(monkeypatch)
    assert numa.place(4096, MIB, wanted=None, device=None) == 1
    assert numa.place(4096, MIB, wanted=0, device=None) == 0  # the config beats it
    assert asked == [(4096, MIB, 1), (4096, MIB, 0)]
    (two_nodes / "bus/pci/devices/0000:17:00.0/numa_node").write_text("-1\n")  # what a kernel says that does not know
    assert numa.place(4096, MIB, wanted=None, device=None) is None


def test_one_node_is_never_asked_for(asked):
    if len(numa.nodes()) > 1:
        pytest.skip("this machine has several")
    assert numa.place(4096, MIB, wanted=0, device=None) is None
    assert asked == []


@pytest.mark.usefixtures("two_nodes")
def test_a_node_that_is_not_there_is_said_so(asked, caplog):
    with caplog.at_level(logging.WARNING, logger="kvtier.buffers"):
        assert numa.place(4096, MIB, wanted=7, device=None) is None
    assert "numa_node=7" in caplog.text
    assert asked == []


@pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")
def test_the_kernel_takes_the_call_and_a_refusal_costs_nothing(caplog):
    memory = HostMemory(MIB)
    assert numa.prefer_node(memory.address, memory.size, 0)
    with caplog.at_level(logging.WARNING, logger="kvtier.buffers"):
        assert not numa.prefer_node(memory.address + mmap.PAGESIZE // 2, memory.size, 0)  # not a page's begin
    assert "node 0" in caplog.text
    memory.view(0, 5)[:] = b"works"
    assert memory.close()


@pytest.mark.usefixtures("two_nodes")
def test_an_arena_says_where_it_lies(asked):
    arena = Arena(8 * MIB, pin=False, numa_node=1)
    arena._thread.join()
    assert arena.stats().numa_node == 1
    assert asked == [(arena.memory.address, 8 * MIB, 1)]
    assert arena.close()


def test_an_arena_says_how_much_lies_in_huge_pages():
    arena = Arena(16 * MIB, pin=False, huge_pages=False)
    arena._thread.join()
    assert arena.stats().huge_bytes == 0
    assert arena.close()
    arena = Arena(16 * MIB, pin=False)
    arena._thread.join()
    assert 0 <= arena.stats().huge_bytes <= 16 * MIB
    assert arena.close()

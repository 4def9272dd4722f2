import array
import gc
import mmap
import pathlib
import re
from pathlib import Path

import pytest
import torch

from kvtier.buffers.memory import PAGE, HostMemory, round_up

MIB = 1 << 20


def mapping(address):
    """The kernel's own account of the mapping at `address`: {field: text}, None if there is none."""
    fields = None
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head is not None:
            if fields is not None:
                return fields
            if int(head[1], 16) <= address < int(head[2], 16):
                fields = {"size": int(head[2], 16) - int(head[1], 16)}
        elif fields is not None:
            name, _, text = line.partition(":")
            fields[name] = text.strip()
    return fields


def backed(memory):
    """Bytes of exactly this memory that have pages: the kernel may show neighbouring mappings as one."""
    pages = memory.size // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(memory.address // mmap.PAGESIZE * 8)
        entries = array.array("Q", pagemap.read(pages * 8))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def test_pages_are_rounded_up():
    assert [round_up(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_aligned_private_and_kept_out_of_children():
    memory = HostMemory(3 * MIB)
    assert memory.address % mmap.PAGESIZE == 0
    flags = mapping(memory.address)["VmFlags"].split()
    assert "dc" in flags  # do not copy on fork
    assert "sh" not in flags
    assert memory.close()


def test_prefault_backs_every_page_and_changes_none():
    memory = HostMemory(40 * MIB)
    memory.view(17 * MIB, 17 * MIB + 5)[:] = b"hello"
    assert backed(memory) <= 4 * MIB
    assert memory.prefault(lambda: False)
    assert backed(memory) == memory.size
    assert bytes(memory.view(17 * MIB, 17 * MIB + 5)) == b"hello"
    assert memory.close()


def test_prefault_stops_when_told():
    memory = HostMemory(64 * MIB)
    answers = iter([False, True])
    assert memory.prefault(lambda: next(answers)) is False
    assert backed(memory) <= 32 * MIB
    assert memory.close()


def test_a_lent_view_is_noticed_when_the_last_thing_made_of_it_goes():
    memory = HostMemory(MIB)
    gone = []
    view = memoryview(memory.lend(PAGE, 3 * PAGE, lambda: gone.append("gone"))).cast("B")
    assert (view.nbytes, view.format, view.readonly) == (2 * PAGE, "B", False)
    part = view[10:20]
    del view
    cast = part.cast("c")
    del part
    tensor = torch.frombuffer(cast, dtype=torch.uint8)
    del cast
    row = tensor.view(2, 5)[1]
    del tensor
    gc.collect()
    assert gone == []
    row[0] = 77
    assert memory.view(PAGE + 15, PAGE + 16)[0] == 77
    del row
    assert gone == ["gone"]
    assert memory.close()


@pytest.mark.parametrize("lent", [False, True])
def test_close_with_a_live_view_keeps_the_memory(lent):
    memory = HostMemory(MIB)
    address = memory.address
    view = memoryview(memory.lend(0, 8, lambda: None)).cast("B") if lent else memory.view(0, 8)
    view[:] = b"survives"
    assert memory.close() is False
    assert bytes(view) == b"survives"
    del view, memory
    gc.collect()
    assert mapping(address) is not None  # leaked on purpose: somebody may still write there


def test_close_succeeds_later():
    memory = HostMemory(MIB)
    view = memory.view(0, 8)
    address = memory.address
    assert memory.close() is False
    del view
    assert memory.close() is True
    assert memory.close() is True
    found = mapping(address)
    assert found is None or found["size"] != MIB


def test_too_much_memory_is_a_clear_error():
    with pytest.raises(MemoryError, match=str(1 << 60)):
        HostMemory(1 << 60)

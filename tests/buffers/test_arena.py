import asyncio
import logging
import random
import sys
import threading

import pytest
import torch

from kvtier.buffers import PAGE, Arena
from kvtier.buffers.arena import default_staging
from kvtier.buffers.slot import release_all, retain_all
from kvtier.errors import CapacityError, ClosedError

MIB = 1 << 20


@pytest.fixture
def make_arena():
    arenas = []

    def make(pages, staging_pages=0):
        arenas.append(Arena(pages * PAGE, staging=staging_pages * PAGE, pin=False))
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.close()


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


def test_slots_are_pages_and_counted_exactly(make_arena):
    arena = make_arena(10)
    first = arena.try_allocate(1)
    second = arena.try_allocate(PAGE + 1)
    assert (first.size, second.size) == (PAGE, 2 * PAGE)
    assert first.address % PAGE == second.address % PAGE == 0
    assert (arena.used, arena.free, arena.capacity) == (3 * PAGE, 7 * PAGE, 10 * PAGE)
    second.release()
    assert (arena.used, arena.high_water) == (PAGE, 3 * PAGE)
    stats = arena.stats()
    assert (stats.used, stats.free, stats.high_water, stats.slots, stats.entries) == (PAGE, 9 * PAGE, 3 * PAGE, 1, 0)
    first.release()
    assert arena.stats().largest_free == 10 * PAGE


def test_no_room_is_none(make_arena):
    arena = make_arena(4)
    held = [arena.try_allocate(PAGE) for _ in range(4)]
    assert arena.try_allocate(1) is None
    held[0].release()
    held[2].release()
    assert arena.try_allocate(2 * PAGE) is None  # two pages are free, but not together
    held[1].release()
    assert arena.try_allocate(3 * PAGE).size == 3 * PAGE


@pytest.mark.parametrize(
    ("capacity", "staging"),
    [(4 << 30, 256 * MIB), (32 * MIB, 4 * MIB), (8 * MIB, 2 * MIB), (PAGE, 0), (8 * PAGE, 2 * PAGE)],
)
def test_the_default_reserve(capacity, staging):
    assert default_staging(capacity) == staging


def test_entries_never_use_the_reserve(make_arena):
    arena = make_arena(10, staging_pages=3)
    entries = [arena.try_allocate(PAGE, entry=True) for _ in range(7)]
    assert None not in entries
    assert arena.try_allocate(PAGE, entry=True) is None
    assert arena.stats().entries == 7 * PAGE
    reads = [arena.try_allocate(PAGE) for _ in range(3)]
    assert None not in reads
    for entry in entries[:2]:
        entry.release()
    assert arena.try_allocate(2 * PAGE) is not None  # the reserve is full: reads may go elsewhere
    assert arena.stats().entries == 5 * PAGE


def test_reads_use_the_reserve_last_so_that_they_can_become_entries(make_arena):
    arena = make_arena(10, staging_pages=3)
    read = arena.try_allocate(2 * PAGE)
    assert read.become_entry()
    assert arena.try_allocate(5 * PAGE, entry=True) is not None
    assert arena.try_allocate(PAGE, entry=True) is None
    assert arena.try_allocate(3 * PAGE).become_entry() is False


def test_a_large_read_may_span_the_reserves_border(make_arena):
    arena = make_arena(10, staging_pages=3)
    whole = arena.try_allocate(10 * PAGE)
    assert whole.size == 10 * PAGE
    whole.trim(8 * PAGE)
    assert arena.used == 8 * PAGE
    whole.trim(6 * PAGE)
    assert arena.try_allocate(2 * PAGE, entry=True) is None
    assert arena.try_allocate(PAGE, entry=True) is not None
    whole.release()
    assert arena.used == PAGE


def test_a_read_becomes_an_entry_only_outside_the_reserve(make_arena):
    arena = make_arena(4, staging_pages=1)
    shared = arena.try_allocate(3 * PAGE)
    reserved = arena.try_allocate(PAGE)
    assert reserved.become_entry() is False
    assert shared.become_entry() is True
    assert shared.become_entry() is True
    assert arena.stats().entries == 3 * PAGE
    shared.release()
    assert arena.stats().entries == 0


def test_trim_gives_back_whole_pages(make_arena):
    arena = make_arena(10)
    slot = arena.try_allocate(10 * PAGE, entry=True)
    slot.trim(3 * PAGE + 1)
    assert (slot.size, arena.used, arena.stats().entries) == (4 * PAGE, 4 * PAGE, 4 * PAGE)
    slot.trim(4 * PAGE)
    assert arena.used == 4 * PAGE
    with pytest.raises(ValueError, match="size=0"):
        slot.trim(0)
    with pytest.raises(ValueError, match="must be between"):
        slot.trim(5 * PAGE)
    slot.retain()
    with pytest.raises(RuntimeError, match="others hold it"):
        slot.trim(PAGE)


def test_the_last_reference_frees(make_arena):
    arena = make_arena(2)
    slot = arena.try_allocate(PAGE)
    assert slot.retain() is slot
    assert slot.references == 2
    slot.release()
    assert arena.used == PAGE
    slot.release()
    assert arena.used == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda slot: slot.release(),
        lambda slot: slot.retain(),
        lambda slot: slot.view(),
        lambda slot: slot.owned_view(),
        lambda slot: slot.trim(PAGE),
        lambda slot: slot.address,
        lambda slot: slot.become_entry(),
    ],
    ids=["release", "retain", "view", "owned_view", "trim", "address", "become_entry"],
)
def test_a_slot_that_went_back_is_loud(make_arena, use):
    arena = make_arena(4)
    slot = arena.try_allocate(2 * PAGE)
    slot.release()
    other = arena.try_allocate(2 * PAGE)  # the same bytes, another slot
    with pytest.raises(RuntimeError, match="after it went back"):
        use(slot)
    assert (other.references, arena.used) == (1, 2 * PAGE)


def test_a_release_too_many_does_not_free_under_a_view(make_arena):
    arena = make_arena(2)
    slot = arena.try_allocate(PAGE)
    view = slot.owned_view()
    slot.release()
    with pytest.raises(RuntimeError, match="only views hold it"):
        slot.release()
    assert arena.used == PAGE
    assert slot.retain().view(0, 1) == view[:1]  # whoever has the view may hold on to more
    del view
    assert (slot.references, arena.used) == (1, PAGE)
    slot.release()
    assert arena.used == 0


def test_many_references_at_once(make_arena):
    arena = make_arena(10)
    slots = [arena.try_allocate(PAGE) for _ in range(4)]
    retain_all(slots)
    assert [slot.references for slot in slots] == [2] * 4
    release_all(slots)
    assert (arena.used, [slot.references for slot in slots]) == (4 * PAGE, [1] * 4)
    release_all(slots[1:])
    assert arena.used == PAGE
    with pytest.raises(RuntimeError, match="after it went back"):
        retain_all(slots)
    retain_all([])
    release_all([])


async def test_references_given_up_together_wake_who_waits(make_arena):
    arena = make_arena(4)
    slots = [arena.try_allocate(PAGE) for _ in range(4)]
    waiting = asyncio.create_task(arena.allocate(3 * PAGE, timeout=60))
    await settle()
    release_all(slots[:3])
    assert (await waiting).size == 3 * PAGE


def test_views_are_the_slots_bytes(make_arena):
    arena = make_arena(4)
    slot, other = arena.try_allocate(PAGE), arena.try_allocate(PAGE)
    slot.view()[:] = b"a" * PAGE
    other.view()[:] = b"b" * PAGE
    slot.view(1, 2)[:] = b"xy"
    assert bytes(slot.owned_view(0, 4)) == b"axya"
    assert slot.view(PAGE - 1).nbytes == 1
    assert slot.view(PAGE).nbytes == slot.owned_view(PAGE).nbytes == 0
    for offset, length in [(-1, 1), (0, PAGE + 1), (PAGE + 1, None), (2, -1)]:
        with pytest.raises(ValueError, match="of a slot of 4096"):
            slot.view(offset, length)
        with pytest.raises(ValueError, match="of a slot of 4096"):
            slot.owned_view(offset, length)
    assert slot.references == 1


def test_the_owned_views_of_a_slot_hold_one_reference_together(make_arena):
    arena = make_arena(4)
    slot = arena.try_allocate(2 * PAGE)
    views = [slot.owned_view(0, PAGE), slot.owned_view(PAGE)]
    assert slot.references == 2
    views[1][0] = 5
    slot.release()
    del views[0]
    assert (arena.used, views[0][0]) == (2 * PAGE, 5)
    again = slot.owned_view(PAGE, 1)
    del views
    assert (slot.references, again[0]) == (1, 5)
    del again
    assert (slot.references, arena.used) == (0, 0)
    with pytest.raises(RuntimeError, match="after it went back"):
        slot.owned_view()


def test_one_view_may_keep_many_slots(make_arena):
    arena = make_arena(8)
    slots = [arena.try_allocate(PAGE) for _ in range(3)]
    slots[2].view(0, 1)[0] = 33
    view = arena.owned_view([*slots, slots[0]])
    assert [slot.references for slot in slots] == [3, 2, 2]
    part = view[slots[2].offset :][:4]
    for slot in slots:
        slot.release()
    del view
    assert (arena.used, part[0]) == (3 * PAGE, 33)
    assert arena.close() is False
    del part
    assert arena.used == 0
    assert arena.close() is True


def test_one_view_keeps_all_of_its_slots_or_none(make_arena):
    arena = make_arena(8)
    slots = [arena.try_allocate(PAGE) for _ in range(3)]
    slots[2].release()
    with pytest.raises(RuntimeError, match="after it went back"):
        arena.owned_view(slots)
    assert [slot.references for slot in slots] == [1, 1, 0]


def test_an_owned_view_keeps_the_slot_until_the_last_tensor_is_gone(make_arena):
    arena = make_arena(4)
    slot = arena.try_allocate(2 * PAGE)
    view = slot.owned_view(0, 16)
    assert slot.references == 2
    slot.release()
    tensor = torch.frombuffer(view[4:12], dtype=torch.uint8)
    del view
    tensor[0] = 9
    assert arena.used == 2 * PAGE
    assert arena.try_allocate(3 * PAGE) is None
    del tensor
    assert arena.try_allocate(4 * PAGE) is not None
    assert slot.references == 0


@pytest.mark.timeout(20)
def test_a_view_may_die_while_the_arena_is_locked(make_arena):
    """Garbage collection runs anywhere, also inside the arena's own critical sections."""
    arena = make_arena(4)
    slot = arena.try_allocate(PAGE)
    view = slot.owned_view()
    slot.release()
    with arena.lock:
        del view
    assert arena.used == 0


async def test_waiting_is_fifo_and_a_dying_view_wakes(make_arena):
    arena = make_arena(4)
    slot = arena.try_allocate(4 * PAGE)
    view = slot.owned_view()
    order = []

    async def take(pages):
        taken = await arena.allocate(pages * PAGE, timeout=60)
        order.append(pages)
        return taken

    tasks = [asyncio.create_task(take(3)), asyncio.create_task(take(1))]
    await settle()
    assert arena.stats().waiting == 2
    slot.release()
    await settle()
    assert order == []
    assert arena.try_allocate(1) is None
    del view
    slots = await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert order == [3, 1]
    for taken in slots:
        taken.release()


async def test_a_small_request_never_overtakes(make_arena):
    arena = make_arena(4)
    first, _second = arena.try_allocate(PAGE), arena.try_allocate(3 * PAGE)
    big = asyncio.create_task(arena.allocate(2 * PAGE, timeout=60))
    await settle()
    first.release()
    await settle()
    assert arena.try_allocate(PAGE) is None  # there is room, but it belongs to the one who came first
    assert arena.try_allocate(PAGE, entry=True) is None
    small = asyncio.create_task(arena.allocate(PAGE, timeout=60))
    await settle()
    assert not small.done()
    big.cancel()
    assert (await small).size == PAGE


async def test_a_view_that_dies_in_another_thread_wakes_the_loop(make_arena):
    arena = make_arena(1)
    slot = arena.try_allocate(PAGE)
    views = [slot.owned_view()]
    slot.release()
    task = asyncio.create_task(arena.allocate(PAGE, timeout=60))
    await settle()
    thread = threading.Thread(target=views.clear)
    thread.start()
    assert (await asyncio.wait_for(task, 20)).size == PAGE
    thread.join()


async def test_entries_wait_behind_reads(make_arena):
    arena = make_arena(4)
    slots = [arena.try_allocate(PAGE) for _ in range(4)]
    order = []

    async def take(name, *, entry):
        slot = await arena.allocate(PAGE, timeout=60, entry=entry)
        order.append((name, slot.entry))

    tasks = [asyncio.create_task(take("put", entry=True))]
    await settle()
    tasks.append(asyncio.create_task(take("read", entry=False)))
    await settle()
    for slot in slots:
        slot.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert order == [("read", False), ("put", True)]


async def test_timeouts_and_hopeless_sizes(make_arena):
    arena = make_arena(4, staging_pages=1)
    slot = arena.try_allocate(4 * PAGE)
    with pytest.raises(TimeoutError):
        await arena.allocate(PAGE, timeout=0.01)
    with pytest.raises(CapacityError, match=str(4 * PAGE)):
        await arena.allocate(4 * PAGE + 1, timeout=60)
    with pytest.raises(CapacityError):
        await arena.allocate(4 * PAGE, timeout=60, entry=True)
    with pytest.raises(ValueError, match="size=0"):
        arena.try_allocate(0)
    slot.release()
    assert (await arena.allocate(4 * PAGE, timeout=0)).size == 4 * PAGE


async def test_granted_and_cancelled_at_once_gives_back(make_arena):
    arena = make_arena(1)
    slot = arena.try_allocate(PAGE)
    task = asyncio.create_task(arena.allocate(PAGE, timeout=60))
    await settle()
    slot.release()
    arena._turns.serve()  # granted; the task has not run since
    assert (arena.used, arena.stats().waiting) == (PAGE, 0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert arena.used == 0


async def test_close_refuses_and_ends_waits(make_arena):
    arena = make_arena(1)
    slot = arena.try_allocate(PAGE)
    waiting = asyncio.create_task(arena.allocate(PAGE, timeout=60))
    await settle()
    assert arena.close() is False
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        arena.try_allocate(PAGE)
    with pytest.raises(ClosedError):
        await arena.allocate(PAGE, timeout=60)
    slot.release()
    assert arena.close() is True
    assert arena.close() is True


@pytest.mark.parametrize("kind", ["slot", "borrowed", "owned"])
def test_close_never_unmaps_under_a_user(make_arena, caplog, kind):
    arena = make_arena(2)
    slot = arena.try_allocate(PAGE)
    view = slot.owned_view() if kind == "owned" else slot.view()
    view[:4] = b"keep"
    if kind != "slot":
        slot.release()
    with caplog.at_level(logging.WARNING, logger="kvtier.buffers"):
        assert arena.close() is False
    assert "stays mapped" in caplog.text
    assert bytes(view[:4]) == b"keep"
    view[:4] = b"more"
    del view
    if kind == "slot":
        slot.release()
    assert arena.close() is True


def test_allocation_may_come_before_the_prefault_ends():
    arena = Arena(256 * MIB, pin=False)
    slot = arena.try_allocate(256 * MIB)
    slot.view(255 * MIB, 6)[:] = b"early!"
    slot.view(0, 6)[:] = b"early!"
    arena._thread.join()
    assert arena.stats().prefaulted
    assert bytes(slot.view(255 * MIB, 6)) == bytes(slot.view(0, 6)) == b"early!"
    slot.release()
    assert arena.close()


@pytest.mark.parametrize(
    ("capacity", "staging", "text"),
    [
        (0, None, "capacity=0"),
        (PAGE - 1, None, "capacity"),
        (PAGE, 2 * PAGE, "staging=8192"),
        (PAGE, -1 * PAGE, "staging"),
    ],
)
def test_senseless_sizes_are_refused(capacity, staging, text):
    with pytest.raises(ValueError, match=text):
        Arena(capacity, staging=staging)


def test_many_threads_at_once(make_arena):
    """Slots, references and dying views in eight threads: bytes never overlap and everything comes back."""
    arena = make_arena(256, staging_pages=16)
    errors = []

    def churn(seed):
        rng = random.Random(seed)
        mark = bytes([seed + 1])
        held = []
        for _ in range(200):
            slot = arena.try_allocate(rng.randrange(1, 6 * PAGE), entry=rng.random() < 0.5)
            if slot is not None:
                view = slot.owned_view()
                view[:1] = view[-1:] = mark
                if rng.random() < 0.5:
                    slot.release()  # the view alone holds it
                    slot = None
                held.append((slot, view))
                del view
            if len(held) > 12 or slot is None:
                drop(held, rng, mark)
        while held:
            drop(held, rng, mark)

    def drop(held, rng, mark):
        if not held:
            return
        slot, view = held.pop(rng.randrange(len(held)))
        if bytes(view[:1]) != mark or bytes(view[-1:]) != mark:
            errors.append("written by another")
        if slot is not None:
            slot.release()

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of everything
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert (arena.used, arena.stats().slots, arena.stats().entries) == (0, 0, 0)
    assert arena.stats().largest_free == arena.capacity

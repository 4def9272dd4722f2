"""What an entry costs: bytes, and the garbage collector's time."""

import gc
import tracemalloc

import pytest

from kvtier.backends.base import Stat
from kvtier.policies.lru import LRUPolicy
from kvtier.sessions import ENDED
from kvtier.testing.clock import FrozenClock
from kvtier.tier.index import NAMELESS, Entry, TierIndex, new_entry
from kvtier.tier.ledger import Ledger

COUNT = 20_000


def key(i):
    return f"{7:016x}/{9:016x}/{i * 0x9E3779B97F4A7C15 % (1 << 128):032x}"


def fill(ledger, *, chain):
    for i in range(COUNT):
        parent = key(i - 1) if chain and i % 32 else None
        ledger.discover(new_entry(key(i), 1000 + 4096, parent=parent))


@pytest.fixture
def ledger():
    return Ledger(capacity=1 << 40, policy=LRUPolicy(), clock=FrozenClock(), protected=lambda _entry: False)


@pytest.mark.parametrize("chain", [True, False], ids=["prompts", "single"])
def test_an_entry_with_its_place_in_the_policy_takes_less_than_500_bytes(ledger, chain):
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        fill(ledger, chain=chain)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ledger.index) == len(ledger.policy) == COUNT
    assert (after - before) / COUNT < 500


def test_the_garbage_collector_does_not_know_entries(ledger):
    gc.collect()
    before = len(gc.get_objects())
    fill(ledger, chain=True)
    gc.collect(1)  # tuples of plain things leave it when it first meets them
    assert len(gc.get_objects()) - before < COUNT // 100


@pytest.mark.parametrize("thing", [new_entry("k", 1), Stat("n", 1)], ids=["entry", "stat"])
def test_what_there_are_many_of_is_not_tracked(thing):
    assert not gc.is_tracked(thing)


@pytest.mark.parametrize("lossy", [False, True, None])
@pytest.mark.parametrize("priority", [0, 1, -1, 7, 10**6, ENDED, 2**61])
def test_priority_and_what_is_known_of_loss_are_kept_apart(priority, lossy):
    entry = new_entry("k", 1, lossy=lossy, priority=priority)
    assert (entry.priority, entry.lossy) == (priority, lossy)
    entry.remark(lossy=True, priority=-priority)
    assert (entry.priority, entry.lossy) == (-priority, True)


def test_a_name_is_that_of_the_key_or_what_is_known_of_it():
    assert new_entry(key(1), 1).name == key(1).replace("/", ".")
    assert new_entry("some text", 1).name.startswith("x-")
    nameless = new_entry(NAMELESS + "x-123", 1)
    assert nameless.nameless
    assert nameless.name == "x-123"


def test_entries_are_compared_by_identity():
    one, other = new_entry("k", 1), new_entry("k", 1)
    assert one != other
    assert len({one, other}) == 2
    assert isinstance(one, Entry)


def test_who_listens_hears_what_comes_meanwhile_and_nothing_else():
    index = TierIndex()
    first, second, third = (new_entry(name, 1) for name in ("first", "second", "third"))
    index.insert(first)
    with index.listening() as one, index.listening() as other:
        index.insert(second)
        index.remove(first)
    index.insert(third)
    assert one == other == [second]

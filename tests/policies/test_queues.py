"""S3-FIFO and ARC: what their queues are for, and hit rates beside the textbook algorithms without prefixes."""

import random
from collections import OrderedDict

import pytest

from kvtier.errors import ConfigError
from kvtier.policies.arc import ARCPolicy
from kvtier.policies.gdsf import GDSFPolicy
from kvtier.policies.ghosts import Ghosts
from kvtier.policies.s3_fifo import S3FIFOPolicy
from kvtier.policies.ttl import TTLPolicy

CAPACITY = 100


class TextbookARC:
    """Megiddo and Modha's ARC(c), as printed in their paper (FAST 2003, figure 4)."""

    def __init__(self):
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def replace(self, *, in_b2):
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def access(self, x):
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            t1.pop(x, None)
            t2.pop(x, None)
            t2[x] = None
            return True
        if x in b1:
            self.p = min(CAPACITY, self.p + max(len(b2) / len(b1), 1))
            self.replace(in_b2=False)
            del b1[x]
            t2[x] = None
        elif x in b2:
            self.p = max(0, self.p - max(len(b1) / len(b2), 1))
            self.replace(in_b2=True)
            del b2[x]
            t2[x] = None
        else:
            first, total = len(t1) + len(b1), len(t1) + len(b1) + len(t2) + len(b2)
            if first == CAPACITY:
                if len(t1) < CAPACITY:
                    b1.popitem(last=False)
                    self.replace(in_b2=False)
                else:
                    t1.popitem(last=False)
            elif total >= CAPACITY:
                if total == 2 * CAPACITY:
                    b2.popitem(last=False)
                self.replace(in_b2=False)
            t1[x] = None
        return False


class TextbookS3FIFO:
    """Yang and others' S3-FIFO, as printed in their paper (SOSP 2023, algorithm 1): 10 % small queue."""

    def __init__(self):
        self.small, self.main, self.ghost = OrderedDict(), OrderedDict(), OrderedDict()

    def access(self, x):
        for queue in (self.small, self.main):
            if x in queue:
                queue[x] = min(queue[x] + 1, 3)
                return True
        while len(self.small) + len(self.main) >= CAPACITY:
            self.evict()
        queue = self.main if self.ghost.pop(x, 0) is None else self.small
        queue[x] = 0
        return False

    def evict(self):
        if len(self.small) < CAPACITY // 10 and self.main:
            while True:
                x, uses = self.main.popitem(last=False)
                if uses == 0:
                    return
                self.main[x] = uses - 1
        while self.small:
            x, uses = self.small.popitem(last=False)
            if uses > 1:
                self.main[x] = 0
            else:
                self.ghost[x] = None
                if len(self.ghost) > CAPACITY - CAPACITY // 10:
                    self.ghost.popitem(last=False)
                return


class Resident:
    """A policy used as a cache of `CAPACITY` one-byte entries."""

    def __init__(self, policy):
        self.policy = policy
        self.now = 0.0

    def access(self, x):
        self.now += 1
        if x in self.policy:
            self.policy.touch(x, self.now)
            return True
        while len(self.policy) >= CAPACITY:
            self.policy.remove(self.policy.victims(1)[0])
        self.policy.insert(x, parent=None, size=1, now=self.now)
        return False


def popular(draw, count):
    """Zipf-like requests with scans between them, and a change of fashion half-way."""
    for i in range(count):
        fashion = 0 if i < count // 2 else 500
        yield f"scan{i}" if i % 1000 < 250 else f"key{fashion + int(draw.paretovariate(0.9)) % 2000}"


@pytest.mark.parametrize(
    ("policy", "textbook", "tolerance"), [(ARCPolicy, TextbookARC, 0.01), (S3FIFOPolicy, TextbookS3FIFO, 0.02)]
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hit_rate_is_that_of_the_textbook(policy, textbook, tolerance, seed):
    requests = list(popular(random.Random(seed), 20_000))
    rates = [sum(cache.access(x) for x in requests) / len(requests) for cache in (Resident(policy()), textbook())]
    assert rates[0] == pytest.approx(rates[1], abs=tolerance)
    assert rates[1] > 0.2


@pytest.mark.parametrize("policy", [ARCPolicy, S3FIFOPolicy])
def test_a_scan_does_not_wash_out_what_is_used_again(policy):
    cache = Resident(policy())
    for _ in range(4):
        for i in range(50):
            cache.access(f"hot{i}")
    for i in range(10_000):
        cache.access(f"scan{i}")
    assert sum(f"hot{i}" in cache.policy for i in range(50)) == 50


def test_s3_fifo_takes_a_returning_entry_into_the_main_queue():
    policy = S3FIFOPolicy()
    policy.insert("again", parent=None, size=1, now=1.0)
    policy.remove("again")
    for i in range(3):
        policy.insert(f"new{i}", parent=None, size=1, now=2.0)
    policy.insert("again", parent=None, size=1, now=3.0)
    policy.insert("later", parent=None, size=1, now=4.0)
    assert policy.victims(4) == ["new0", "new1", "new2", "later"]


def test_s3_fifo_stops_at_the_share_of_the_small_queue_within_one_answer():
    policy = S3FIFOPolicy(small_share=0.5, uses_to_stay=1)
    for i in range(4):
        policy.insert(f"main{i}", parent=None, size=1, now=1.0)
        policy.touch(f"main{i}", 1.0)
    for i in range(6):
        policy.insert(f"small{i}", parent=None, size=1, now=2.0)
    assert policy.victims(5) == ["small0", "small1", "main0", "small2", "main1"]


def test_s3_fifo_saves_a_used_entry_of_the_main_queue_for_a_lap():
    policy = S3FIFOPolicy(small_share=0.01, uses_to_stay=1)
    for key in ("a", "b", "c"):
        policy.insert(key, parent=None, size=1, now=1.0)
        policy.touch(key, 2.0)
    policy.touch("a", 3.0)
    assert policy.victims(3) == ["b", "c", "a"]


def test_s3_fifo_saves_for_at_most_three_laps():
    policy = S3FIFOPolicy(small_share=0.01, uses_to_stay=1)
    policy.insert("old star", parent=None, size=1, now=1.0)
    for _ in range(100):
        policy.touch("old star", 1.0)
    for i in range(12):  # each new entry is used once, and the one before it goes
        policy.insert(f"new{i}", parent=None, size=1, now=2.0)
        policy.touch(f"new{i}", 2.0)
        if i:
            policy.remove(policy.victims(1)[0])
    assert "old star" not in policy


def test_arc_gives_recency_more_room_when_it_gave_up_too_early():
    policy = ARCPolicy()
    for i in range(4):
        policy.insert(f"once{i}", parent=None, size=1, now=1.0)
        policy.insert(f"twice{i}", parent=None, size=1, now=1.0)
        policy.touch(f"twice{i}", 2.0)
    assert policy.victims(1) == ["once0"]
    for i in range(4):
        policy.remove(f"once{i}")
    for i in range(4):
        policy.insert(f"once{i}", parent=None, size=1, now=3.0)
    policy.insert("newcomer", parent=None, size=1, now=4.0)
    assert policy.victims(1) == ["twice0"]


def test_s3_fifo_does_not_turn_for_a_deleted_favourite():
    policy = S3FIFOPolicy(small_share=0.01, uses_to_stay=1)
    for key in ("favourite", "a", "b"):
        policy.insert(key, parent=None, size=1, now=1.0)
        policy.touch(key, 1.0)
    for key in ("favourite", "favourite", "a", "a"):
        policy.touch(key, 2.0)
    policy.remove("favourite")
    policy.insert("c", parent=None, size=1, now=3.0)
    policy.touch("c", 3.0)
    assert policy.victims(3) == ["b", "c", "a"]  # a is two laps ahead of c, as before


def test_arc_gives_frequency_its_room_back():
    policy = ARCPolicy()
    for i in range(4):
        policy.insert(f"once{i}", parent=None, size=1, now=1.0)
        policy.insert(f"twice{i}", parent=None, size=1, now=1.0)
        policy.touch(f"twice{i}", 2.0)
    for i in range(4):  # recency was given up too early: its target grows to 4
        policy.remove(f"once{i}")
        policy.insert(f"once{i}", parent=None, size=1, now=3.0)
    policy.insert("new0", parent=None, size=1, now=4.0)
    policy.insert("new1", parent=None, size=1, now=4.0)
    assert policy.victims(1) == ["twice0"]
    for i in range(3):  # now frequency was
        policy.remove(f"twice{i}")
        policy.insert(f"twice{i}", parent=None, size=1, now=5.0)
    assert policy.victims(1) == ["new0"]


def test_arc_keeps_a_value_put_again_among_those_used_again():
    policy = ARCPolicy()
    policy.insert("again", parent=None, size=1, now=1.0)
    policy.insert("again", parent=None, size=1, now=2.0)
    policy.insert("once", parent=None, size=1, now=3.0)
    assert policy.victims(1) == ["once"]


def test_ghosts_forget_the_oldest_and_are_bounded_without_sizes_too():
    ghosts = Ghosts()
    for i in range(10):
        ghosts.add(f"g{i}", 10)
    ghosts.trim(35, 100)
    assert [ghosts.pop(f"g{i}") for i in range(10)] == [False] * 7 + [True] * 3
    assert ghosts.size == 0
    for i in range(1000):
        ghosts.add(f"empty{i}", 0)
        ghosts.trim(100, 10)
    assert len(ghosts) <= 10 + 64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: S3FIFOPolicy(small_share=0), "s3-fifo: small_share is 0"),
        (lambda: S3FIFOPolicy(small_share=1.0), "between 0 and 1"),
        (lambda: S3FIFOPolicy(uses_to_stay=0), "uses_to_stay is 0; write at least 1"),
        (lambda: GDSFPolicy(cost="token"), "'entry' or 'byte'"),
        (lambda: TTLPolicy(seconds=0), "ttl: seconds is 0"),
        (lambda: TTLPolicy(seconds=float("inf")), "finite"),
        (lambda: TTLPolicy(seconds=float("nan")), "finite"),
    ],
)
def test_wrong_options_are_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()

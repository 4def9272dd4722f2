"""One sync of a directory serves all who changed it before it began, and nobody who came later."""

import os
import threading

import pytest

from kvtier.backends import disk_sync
from kvtier.backends.disk_sync import GroupedSync


class HeldSync:
    """Stands for `os.fsync`: each call waits until it is let go on."""

    def __init__(self):
        self.calls = 0
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.fault = None

    def __call__(self, fd):
        self.calls += 1
        self.begun.release()
        assert self.go_on.acquire(timeout=60)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault


@pytest.fixture
def held(monkeypatch):
    sync = HeldSync()
    monkeypatch.setattr(disk_sync.os, "fsync", sync)
    return sync


def start(grouped, shard, outcomes):
    def run():
        try:
            grouped.sync(shard, 0)
            outcomes.append("synced")
        except OSError:
            outcomes.append("failed")

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def waiting(grouped, count):
    """Wait until so many threads wait for a sync that runs."""
    while len(grouped._changed._waiters) < count:
        os.sched_yield()


def test_those_who_came_while_one_ran_share_the_next(held):
    grouped, outcomes = GroupedSync(), []
    threads = [start(grouped, 7, outcomes)]
    assert held.begun.acquire(timeout=60)
    threads += [start(grouped, 7, outcomes) for _ in range(5)]
    waiting(grouped, 5)
    held.go_on.release()
    assert held.begun.acquire(timeout=60)
    held.go_on.release()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["synced"] * 6
    assert held.calls == 2


def test_directories_do_not_wait_for_each_other(held):
    grouped, outcomes = GroupedSync(), []
    threads = [start(grouped, shard, outcomes) for shard in range(3)]
    for _ in range(3):
        assert held.begun.acquire(timeout=60)
    held.go_on.release(3)
    for thread in threads:
        thread.join(60)
    assert held.calls == 3


def test_a_sync_that_fails_serves_nobody(held):
    grouped, outcomes = GroupedSync(), []
    held.fault = OSError(5, "Input/output error")
    first = start(grouped, 1, outcomes)
    assert held.begun.acquire(timeout=60)
    second = start(grouped, 1, outcomes)
    waiting(grouped, 1)
    held.go_on.release()
    assert held.begun.acquire(timeout=60)
    held.go_on.release()
    first.join(60)
    second.join(60)
    assert sorted(outcomes) == ["failed", "synced"]

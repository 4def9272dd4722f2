import pytest
import torch

from kvtier.buffers import PAGE, Arena, LeaseShare


class Clock:
    now = 50.0

    def monotonic(self):
        return self.now

    def wall(self):
        return 0.0


@pytest.fixture
def clock():
    return Clock()


def test_the_share_is_never_exceeded(clock):
    share = LeaseShare(100, max_seconds=30, clock=clock)
    first = share.try_take(60)
    assert share.try_take(41) is None
    second = share.try_take(40)
    assert (share.used, share.count) == (100, 2)
    assert share.room == 0
    first.release()
    assert (share.used, share.count, share.room) == (40, 1, 60)
    assert share.try_take(60) is not None
    second.release()
    assert share.try_take(40) is not None  # without a look at the share in between
    assert share.used == 100


def test_releasing_twice_is_loud(clock):
    hold = LeaseShare(100, max_seconds=30, clock=clock).try_take(10)
    hold.release()
    with pytest.raises(RuntimeError, match="twice"):
        hold.release()


def test_a_lease_counts_until_the_last_tensor_over_it_is_gone(clock):
    arena = Arena(4 * PAGE, staging=0, pin=False)
    slot = arena.try_allocate(2 * PAGE)
    share = LeaseShare(100, max_seconds=30, clock=clock)
    hold = share.try_take(80)
    views = [slot.owned_view(0, PAGE), slot.owned_view(PAGE)]
    hold.cover(views)
    tensor = torch.frombuffer(views[1][8:16], dtype=torch.uint8)
    del views
    hold.release()
    assert share.used == 80  # the caller kept a tensor beyond the lease's end
    assert share.try_take(21) is None
    del tensor
    assert share.used == 0
    slot.release()
    assert arena.close()


def test_views_that_died_early_do_not_end_a_running_lease(clock):
    arena = Arena(4 * PAGE, staging=0, pin=False)
    slot = arena.try_allocate(PAGE)
    share = LeaseShare(100, max_seconds=30, clock=clock)
    hold = share.try_take(80)
    hold.cover([slot.owned_view()])
    assert share.used == 80
    slot.release()
    assert arena.close()


def test_overdue_leases_are_told_once_and_not_taken_back(clock):
    share = LeaseShare(100, max_seconds=30, clock=clock)
    old = share.try_take(10)
    clock.now += 20
    share.try_take(10)
    assert share.overdue() == []
    clock.now += 10
    assert share.overdue() == [old]
    assert share.overdue() == []
    assert old.age == 30
    assert share.used == 20
    old.release()
    clock.now += 100
    assert len(share.overdue()) == 1


def test_what_lingers_after_its_lease_is_overdue_too(clock):
    arena = Arena(PAGE, staging=0, pin=False)
    slot = arena.try_allocate(PAGE)
    share = LeaseShare(100, max_seconds=30, clock=clock)
    hold = share.try_take(10)
    view = slot.owned_view()
    hold.cover([view])
    hold.release()
    clock.now += 31
    assert share.overdue() == [hold]
    del view
    slot.release()
    assert arena.close()

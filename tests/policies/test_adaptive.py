"""What adaptive learns, when it gives way to recency, and that it forgets."""

from itertools import accumulate

from kvtier.policies.adaptive import AdaptivePolicy
from kvtier.policies.duel import Duel
from kvtier.policies.lru import LRUPolicy
from kvtier.policies.reuse_times import _EDGES, BINS, ReuseTimes, _worth, bin_of


def steepest(reused, held, i):
    return max((reused[j] - reused[i]) / (held[j] - held[i]) for j in range(i + 1, BINS + 1))


def test_the_worth_is_the_best_ratio_over_all_horizons():
    reused = [min(0.9, x) for x in accumulate([0.001 * (i % 7) ** 2 for i in range(BINS)], initial=0.0)]
    spans = [_EDGES[i + 1] - _EDGES[i] for i in range(BINS)]
    held = list(accumulate((s * (1 - (reused[i] + reused[i + 1]) / 2) for i, s in enumerate(spans)), initial=0.0))
    worth = _worth(reused)
    for i in range(BINS):
        assert abs(worth[i] - steepest(reused, held, i)) < 1e-12, f"bin {i}"


def test_entries_that_wait_a_minute_are_worth_most_just_before():
    times = ReuseTimes(2)
    for _ in range(1000):
        times.came(0)
        times.used(0, 60.0)
        times.came(1)
    times.learn()
    assert 20 < times.peak_seconds[0] <= 60
    assert times.worth[0][bin_of(50.0)] > 10 * times.worth[1][bin_of(50.0)]


def replay(policy, rounds, capacity=40):
    """Four prompts come back every 40 s; between them hundreds pass that never do."""
    resident, hits = set(), 0
    for number in range(rounds):
        kept = number % 10 == 0
        name = f"kept{number // 10 % 4}" if kept else f"once{number}"
        parent = None
        for depth in range(4):
            key, now = f"{name}.{depth}", number * 1.0
            if key in resident:
                hits += kept
                policy.touch(key, now)
            else:
                if len(resident) >= capacity:
                    for victim in policy.victims(1):
                        policy.remove(victim)
                        resident.discard(victim)
                policy.insert(key, parent=parent, size=1, now=now)
                resident.add(key)
            parent = key
    return hits


def test_what_comes_back_outlives_what_does_not():
    assert replay(LRUPolicy(), 3_000) == 0  # ten prompts fit, and forty pass before one comes back
    assert replay(AdaptivePolicy(), 3_000) > 600  # of 1,184


def test_names_of_gone_entries_are_bounded():
    policy = AdaptivePolicy()
    for number in range(30_000):
        policy.insert(f"k{number}", parent=None, size=1, now=float(number))
        if number >= 50:
            policy.remove(f"k{number - 50}")
    assert len(policy._known) <= 50 + 2 * 51 + 20_000 + 51


def test_recency_is_followed_once_it_leads_and_left_again():
    duel, number = Duel(), {}
    for run in range(400):
        key = f"k{run % 5}"
        duel.used(key, 1, 10, before=number.get(key), hit=False)  # the policy lost what recency would have
        number[key] = duel.number
        duel.end_run(entries=10)
        if duel.recency:
            break
    assert duel.recency
    for _ in range(1000):
        duel.end_run(entries=10)
        if not duel.recency:
            break
    assert not duel.recency

"""Every built-in policy against the shipped kit, and the kit against policies that are broken on purpose."""

import inspect

import pytest

from kvtier.policies.adaptive import AdaptivePolicy
from kvtier.policies.arc import ARCPolicy
from kvtier.policies.fifo import FIFOPolicy
from kvtier.policies.gdsf import GDSFPolicy
from kvtier.policies.lfu import LFUPolicy
from kvtier.policies.lru import LRUPolicy
from kvtier.policies.s3_fifo import S3FIFOPolicy
from kvtier.policies.ttl import TTLPolicy
from kvtier.testing.broken_policies import BROKEN, SLOW, PlainPolicy
from kvtier.testing.policies import PolicyConformance

MAKERS = {
    "lru": LRUPolicy,
    "lfu": LFUPolicy,
    "fifo": FIFOPolicy,
    "gdsf": GDSFPolicy,
    "gdsf-byte": lambda: GDSFPolicy(cost="byte"),
    "s3-fifo": S3FIFOPolicy,
    "s3-fifo-eager": lambda: S3FIFOPolicy(small_share=0.5, uses_to_stay=1),
    "arc": ARCPolicy,
    "adaptive": AdaptivePolicy,
    "ttl-of-lru": lambda: TTLPolicy(seconds=1e6),
    "ttl-of-arc": lambda: TTLPolicy(seconds=1e6, inner=ARCPolicy()),
    "ttl-of-s3-fifo": lambda: TTLPolicy(seconds=1e6, inner=S3FIFOPolicy()),
}


class TestBuiltins(PolicyConformance):
    @pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
    def make_policy(self, request):
        return request.param


def faults_found(make_policy) -> list[str]:
    """Run every test of the kit; return what failed."""
    kit, found = PolicyConformance(), []
    for name, test in inspect.getmembers(kit, inspect.ismethod):
        if not name.startswith("test_") or "work_does_not_grow" in name:  # all of them are slow
            continue
        marks = getattr(test, "pytestmark", [])
        for values in marks[0].args[1] if marks else [None]:
            extra = {} if values is None else {marks[0].args[0]: values}
            try:
                test(make_policy, **extra)
            except Exception as exc:
                found.append(f"{name}: {exc}")
    return found


@pytest.mark.parametrize("broken", BROKEN)
def test_the_kit_catches(broken):
    assert faults_found(broken)


def test_the_kit_finds_nothing_in_the_plain_policy():
    assert faults_found(PlainPolicy) == []


@pytest.mark.parametrize("slow", SLOW)
def test_the_kit_catches_slowness(slow):
    with pytest.raises(AssertionError, match="steps per operation"):
        PolicyConformance().test_work_does_not_grow_with_the_number_of_entries(slow)

"""What a tier's ledger tells its policy."""

from kvtier.policies.lfu import LFUPolicy
from kvtier.testing.clock import FrozenClock
from kvtier.tier.index import new_entry
from kvtier.tier.ledger import Ledger


def entry(key):
    return new_entry(key, 10)


def test_a_value_put_again_keeps_what_the_policy_knows_of_its_key():
    ledger = Ledger(capacity=100, policy=LFUPolicy(), clock=FrozenClock(), protected=lambda _entry: False)
    for key in ("again", "again", "again", "once"):
        ledger.add(entry(key))
    assert list(ledger.policy.coldest_first()) == ["once", "again"]
    ledger.add(entry("once"))
    assert list(ledger.policy.coldest_first()) == ["once", "again"]  # twice against three times
    assert ledger.usage == 20

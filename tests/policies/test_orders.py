"""The order of each policy against a slow, obvious model of it (hypothesis finds the histories)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policies.fifo import FIFOPolicy
from kvtier.policies.gdsf import GDSFPolicy
from kvtier.policies.lfu import LFUPolicy
from kvtier.policies.lru import LRUPolicy
from kvtier.policies.ttl import TTLPolicy
from kvtier.testing.broken_policies import PlainPolicy

KEYS = [f"k{i}" for i in range(7)]
MIB = 1 << 20

histories = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert"),
            st.sampled_from(KEYS),
            st.sampled_from([None, *KEYS]),
            st.sampled_from([1, MIB, 3 * MIB]),
            st.sampled_from([0, 0, 1]),
        ),
        st.tuples(st.just("touch"), st.sampled_from(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS)),
        st.tuples(st.just("evict"), st.integers(1, 4 * MIB)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 4.0])),
    ),
    min_size=8,
    max_size=50,
)


class PlainFIFO(PlainPolicy):
    def touch(self, key, now):
        pass


class PlainLFU(PlainPolicy):
    def __init__(self):
        super().__init__()
        self.uses = {}

    def use(self, key):
        super().use(key)
        self.uses[key] = self.uses.get(key, 0) + 1

    def remove(self, key):
        super().remove(key)
        self.uses.pop(key, None)

    def rank(self, key):
        return self.priorities[key], self.uses[key], self.used[key]


class PlainGDSF(PlainLFU):
    def __init__(self):
        super().__init__()
        self.age = 0.0
        self.worth = {}

    def use(self, key):
        super().use(key)
        self.worth[key] = self.age + self.uses[key] * (MIB / self.sizes[key])

    def rank(self, key):
        return self.priorities[key], self.worth[key], self.used[key]

    def remove(self, key):
        known = key in self.sizes
        super().remove(key)
        if known:
            coldest = min(self.candidates(set()), key=self.rank, default=key)
            self.age = max(self.age, min(self.worth[key], self.worth[coldest]))
            del self.worth[key]


class PlainTTL(PlainPolicy):
    """LRU to which everything put in 5 seconds ago is put in again, with a priority below all others."""

    def __init__(self):
        super().__init__()
        self.young = {}

    def age(self, now):
        for key in sorted(self.young, key=self.young.get):
            if now - self.young[key][0] >= 5.0:
                del self.young[key]
                self.priorities[key] = -1000
                self.use(key)

    def insert(self, key, *, parent, size, now, priority=0):
        self.age(now)
        super().insert(key, parent=parent, size=size, now=now, priority=priority)
        self.young[key] = (now, self.clock)

    def touch(self, key, now):
        self.age(now)
        super().touch(key, now)

    def remove(self, key):
        super().remove(key)
        self.young.pop(key, None)


def agree(policy, model, history):
    now = 0.0
    for verb, *rest in history:
        now += 0.01
        if verb == "insert":
            key, parent, size, priority = rest
            for each in (policy, model):
                each.insert(key, parent=parent, size=size, now=now, priority=priority)
        elif verb == "touch":
            policy.touch(rest[0], now)
            model.touch(rest[0], now)
        elif verb == "remove":
            policy.remove(rest[0])
            model.remove(rest[0])
        elif verb == "wait":
            now += rest[0]
        else:
            named = list(policy.victims(rest[0]))
            assert named == list(model.victims(rest[0]))
            for key in named:
                policy.remove(key)
                model.remove(key)
        assert list(policy.coldest_first()) == list(model.coldest_first())
        total = sum(model.sizes.values())
        assert list(policy.victims(total)) == list(model.victims(total))


def order(policy, history):
    """Play e.g. "a b +a -b": put a and b in, use a, remove b; return the keys from first to last to go."""
    for now, word in enumerate(history.split()):
        if word[0] == "+":
            policy.touch(word[1:], float(now))
        elif word[0] == "-":
            policy.remove(word[1:])
        else:
            policy.insert(word, parent=None, size=MIB, now=float(now))
    return " ".join(policy.coldest_first())


def test_examples():
    assert order(LRUPolicy(), "a b c +a") == "b c a"
    assert order(LRUPolicy(), "a b c a") == "b c a"
    assert order(FIFOPolicy(), "a b c +a") == "a b c"
    assert order(FIFOPolicy(), "a b c a") == "b c a"
    assert order(LFUPolicy(), "a +a +a b +b c d") == "c d b a"
    assert order(LFUPolicy(), "a a a b b c +b") == "c a b"
    assert order(GDSFPolicy(), "a +a +a b +b c") == "c b a"
    assert order(GDSFPolicy(), "a +a b c -b -c d +d") == "a d"  # the age is 1 when d comes: 2 against 3
    assert order(GDSFPolicy(), "a +a +a +a z b -a c") == "z b c"  # deleting what is worth most ages nobody beyond z
    assert order(TTLPolicy(seconds=3), "a b +a +b") == "a b"  # a is past the age, b is not
    assert order(TTLPolicy(seconds=3), "a b a +b +b") == "b a"  # a was put again at 2
    assert order(TTLPolicy(seconds=3), "a b -a +b +b +b") == "b"


def test_gdsf_weighs_size_only_when_asked():
    for cost, named in (("entry", "large small"), ("byte", "small large")):
        policy = GDSFPolicy(cost=cost)
        policy.insert("small", parent=None, size=MIB, now=1.0)
        policy.insert("large", parent=None, size=4 * MIB, now=2.0)
        assert " ".join(policy.coldest_first()) == named


def test_gdsf_takes_entries_of_no_size():
    policy = GDSFPolicy()
    policy.insert("empty", parent=None, size=0, now=1.0)
    policy.insert("full", parent=None, size=1, now=2.0)
    assert policy.victims(1) == ["empty", "full"]


@given(histories)
def test_lru_goes_by_last_use(history):
    agree(LRUPolicy(), PlainPolicy(), history)


@given(histories)
def test_fifo_goes_by_entry(history):
    agree(FIFOPolicy(), PlainFIFO(), history)


@given(histories)
def test_lfu_goes_by_uses_then_last_use(history):
    agree(LFUPolicy(), PlainLFU(), history)


@given(histories)
def test_gdsf_goes_by_worth_that_ages(history):
    agree(GDSFPolicy(), PlainGDSF(), history)


@given(histories)
@settings(max_examples=50)
def test_gdsf_by_byte_ignores_size(history):
    unit = [(verb, rest[0], rest[1], MIB, rest[3]) if verb == "insert" else (verb, *rest) for verb, *rest in history]
    policy, other = GDSFPolicy(cost="byte"), GDSFPolicy(cost="entry")
    agree(policy, PlainGDSF(), unit)
    agree(other, PlainGDSF(), unit)


@given(histories)
def test_ttl_puts_what_is_old_first(history):
    agree(TTLPolicy(seconds=5), PlainTTL(), history)

"""`PolicyConformance`: what every eviction policy must do, for a subclass of six lines.

class TestMine(PolicyConformance):
@pytest.fixture
def make_policy(self):
return MyPolicy
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kvtier.policies.base import Policy
from kvtier.testing.policy_model import PolicyModel
from kvtier.testing.policy_walks import Walk, steps_per_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    MakePolicy = Callable[[], Policy]

WALKS = 60
WALK_STEPS = 60
FEW, MANY = 400, 6_400
GROWTH = 3.0  # a logarithm grows 1.5-fold from FEW to MANY, a scan 16-fold


class PolicyConformance:
    """Subclass it in your tests and define the fixture `make_policy`, which returns a maker of empty policies."""

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        """Return what makes a new, empty policy."""
        raise NotImplementedError

    def test_an_empty_policy_names_nobody(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        assert isinstance(policy, Policy)
        assert len(policy) == 0
        assert "a" not in policy
        assert list(policy.victims(1)) == []
        assert list(policy.coldest_first()) == []

    def test_counts_what_it_holds(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        insert(policy, ["a", "b", "c"])
        policy.insert("b", parent="a", size=9, now=4.0)
        policy.remove("a")
        assert len(policy) == 2
        assert "b" in policy
        assert "a" not in policy

    def test_unknown_keys_are_ignored(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        insert(policy, ["a"])
        policy.touch("stranger", 2.0)
        policy.remove("stranger")
        assert len(policy) == 1
        assert list(policy.victims(1)) == ["a"]

    def test_nothing_is_named_when_nothing_is_needed(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        insert(policy, ["a", "b"])
        assert list(policy.victims(0)) == []
        assert list(policy.victims(-1)) == []

    @pytest.mark.parametrize("backwards", [False, True], ids=["parent-first", "child-first"])
    def test_children_go_before_their_parents(self, make_policy: MakePolicy, *, backwards: bool) -> None:
        chain = [f"chunk{i}" for i in range(6)]
        policy = make_policy()
        insert(policy, chain, backwards=backwards)
        for now, key in enumerate(chain if backwards else reversed(chain), 10):
            policy.touch(key, float(now))
        assert list(policy.victims(6)) == chain[::-1]
        assert list(policy.coldest_first()) == chain[::-1]

    def test_an_entry_whose_parent_is_away_can_go(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        policy.insert("c", parent="b", size=1, now=1.0)
        assert list(policy.victims(1)) == ["c"]

    def test_removing_the_middle_frees_what_is_above_and_its_return_ties_it_again(
        self, make_policy: MakePolicy
    ) -> None:
        policy = make_policy()
        insert(policy, ["a", "b", "c"])
        policy.remove("b")
        assert sorted(policy.victims(2)) == ["a", "c"]
        policy.insert("b", parent="a", size=1, now=9.0)
        assert list(policy.victims(3)) == ["c", "b", "a"]

    def test_a_new_parent_replaces_the_old_one(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        insert(policy, ["a", "b"])
        policy.insert("z", parent=None, size=1, now=3.0)
        policy.insert("b", parent="z", size=1, now=4.0)
        assert list(policy.victims(1, protected=lambda key: key == "b")) == ["a"]
        assert list(policy.victims(2, protected=lambda key: key == "a")) == ["b", "z"]

    def test_a_new_size_replaces_the_old_one(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        policy.insert("a", parent=None, size=1, now=1.0)
        policy.insert("a", parent=None, size=100, now=2.0)
        assert list(policy.victims(100)) == ["a"]
        policy.insert("a", parent=None, size=10, now=3.0)
        assert list(policy.victims(11)) == []

    def test_circles_hold_nobody_for_ever(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        policy.insert("self", parent="self", size=1, now=1.0)
        policy.insert("a", parent="b", size=1, now=2.0)
        policy.insert("b", parent="c", size=1, now=3.0)
        policy.insert("c", parent="a", size=1, now=4.0)
        assert sorted(policy.victims(4)) == ["a", "b", "c", "self"]

    def test_all_or_nothing(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        insert(policy, ["a", "b", "c"])
        assert list(policy.victims(4)) == []
        assert list(policy.victims(3, protected=lambda key: key == "a")) == []
        assert len(policy) == 3

    def test_protected_keys_and_what_they_build_on_stay(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        insert(policy, ["a", "b", "c", "d"])
        assert list(policy.victims(1, protected=lambda key: key == "b")) == ["d"]
        assert list(policy.victims(2, protected=lambda key: key == "b")) == ["d", "c"]
        assert list(policy.victims(3, protected=lambda key: key == "b")) == []

    @pytest.mark.parametrize("form", ["{1}", "00112233445566{0}/0000000000000000/{1}"], ids=["plain", "namespaced"])
    def test_those_over_their_share_go_first(self, make_policy: MakePolicy, form: str) -> None:
        fair, over = form.format("aa", "aa1"), [form.format("bb", f"bb{i}") for i in range(3)]
        policy = make_policy()
        policy.insert(fair, parent=None, size=1, now=1.0)
        for i, key in enumerate(over):
            policy.insert(key, parent=over[i - 1] if i else None, size=1, now=2.0 + i, priority=1)
            policy.touch(key, 3.0 + i)
        assert list(policy.victims(4, over_share=over.__contains__)) == [*over[::-1], fair]

    def test_lower_priorities_go_first(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        policy.insert("dear", parent=None, size=1, now=1.0, priority=5)
        policy.insert("cheap", parent=None, size=1, now=2.0, priority=-1)
        policy.insert("plain", parent=None, size=1, now=3.0)
        for now in (4.0, 5.0):
            policy.touch("cheap", now)
        assert list(policy.victims(3)) == ["cheap", "plain", "dear"]

    def test_no_more_are_named_than_needed(self, make_policy: MakePolicy) -> None:
        policy = make_policy()
        for i in range(10):
            policy.insert(f"k{i}", parent=None, size=10, now=float(i))
        assert len(policy.victims(1)) == 1
        assert len(policy.victims(10)) == 1
        assert len(policy.victims(11)) == 2

    def test_iterates_everything_children_first(self, make_policy: MakePolicy) -> None:
        for seed in range(WALKS // 4):
            policy, model = make_policy(), PolicyModel()
            for step in Walk(seed).steps(WALK_STEPS):
                step.apply(policy, model)
            order = list(policy.coldest_first())
            assert sorted(order) == sorted(model.entries), f"seed {seed}"
            place = {key: i for i, key in enumerate(order)}
            early = [k for k, e in model.entries.items() if e.parent in place and place[k] > place[e.parent]]
            assert not early, f"seed {seed}: {early} come after their parents"

    def test_every_answer_is_a_right_one(self, make_policy: MakePolicy) -> None:
        for seed in range(WALKS):
            policy, model = make_policy(), PolicyModel()
            walk = Walk(seed)
            for done, step in enumerate(walk.steps(WALK_STEPS)):
                step.apply(policy, model)
                assert len(policy) == len(model.entries), f"seed {seed}, step {done}"
                need, protected, over_share = walk.question(model)
                answer = policy.victims(need, protected=protected, over_share=over_share)
                faults = model.judge(answer, need, protected=protected, over_share=over_share)
                assert not faults, f"seed {seed}, step {done}, need {need}: {faults}"
                if walk.random.random() < 0.3:
                    for key in answer:
                        policy.remove(key)
                        model.remove(key)

    def test_asking_changes_nothing(self, make_policy: MakePolicy) -> None:
        for seed in range(WALKS // 2):
            policy, unasked, model = make_policy(), make_policy(), PolicyModel()
            total = 0
            for done, step in enumerate(Walk(seed).steps(WALK_STEPS)):
                step.apply(policy, model)
                step.apply(unasked, PolicyModel())
                total = sum(entry.size for entry in model.entries.values())
                first = [list(policy.victims(need)) for need in (1, total, total // 2)]
                again = [list(policy.victims(need)) for need in (1, total, total // 2)]
                assert first == again, f"seed {seed}, step {done}: asked again, it answered otherwise"
                list(policy.coldest_first())
            assert list(policy.victims(total)) == list(unasked.victims(total)), f"seed {seed}: asking changed the order"
            assert list(policy.coldest_first()) == list(unasked.coldest_first()), f"seed {seed}"

    def test_work_does_not_grow_with_the_number_of_entries(self, make_policy: MakePolicy) -> None:
        few, many = (steps_per_operation(make_policy(), entries) for entries in (FEW, MANY))
        assert many < GROWTH * few, f"{few:.0f} steps per operation at {FEW} entries, {many:.0f} at {MANY}"


def insert(policy: Policy, chain: Sequence[str], *, backwards: bool = False) -> None:
    """Put in a chain of one-byte entries, each the parent of the next."""
    parents = {child: parent for parent, child in pairwise(chain)}
    for now, key in enumerate(reversed(chain) if backwards else chain, 1):
        policy.insert(key, parent=parents.get(key), size=1, now=float(now))

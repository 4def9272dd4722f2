from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtier.buffers.extents import Extents

FIRST, PAGES, BARRIER = 10, 90, 32  # barriers at 32, 64 and 96


def runs(free):
    """Lengths of the maximal runs of free pages, cut at barriers: the plain model of what can be taken."""
    lengths, run = [], 0
    for page in range(FIRST, FIRST + PAGES + 1):
        if run and (page not in free or page % BARRIER == 0):
            lengths.append(run)
            run = 0
        if page in free:
            run += 1
    return lengths


class ExtentsMachine(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self):
        super().__init__()
        self.extents = Extents(FIRST, PAGES, barrier=BARRIER)
        self.free = set(range(FIRST, FIRST + PAGES))

    @rule(target=taken, pages=st.integers(1, 40))
    def take(self, pages):
        fitting = [length for length in runs(self.free) if length >= pages]
        start = self.extents.take(pages)
        if not fitting:
            assert start is None
            return (0, 0)
        wanted = set(range(start, start + pages))
        assert wanted <= self.free
        before = runs(self.free)
        self.free -= wanted
        after = runs(self.free)
        assert len(after) in (len(before), len(before) - 1)
        best = min(fitting)  # best fit: the remainder comes from a smallest run that holds it
        assert sorted(after) == sorted([*_without(before, best), *([best - pages] if best > pages else [])])
        return (start, pages)

    @rule(extent=consumes(taken))
    def give(self, extent):
        start, pages = extent
        if pages:
            self.extents.give(start, pages)
            self.free |= set(range(start, start + pages))

    @rule(target=taken, extent=consumes(taken), kept=st.integers(1, 40))
    def give_tail(self, extent, kept):
        start, pages = extent
        if kept >= pages:
            return extent
        self.extents.give(start + kept, pages - kept)
        self.free |= set(range(start + kept, start + pages))
        return (start, kept)

    @rule(target=taken, pages=st.integers(1, 4))
    def take_at_the_end(self, pages):
        if self.extents.free_at_end < pages:
            return (0, 0)
        start = FIRST + PAGES - pages
        self.extents.take_at(start, pages)
        self.free -= set(range(start, start + pages))
        return (start, pages)

    @invariant()
    def agrees_with_the_model(self):
        lengths = runs(self.free)
        assert self.extents.free == len(self.free)
        assert self.extents.count == len(lengths)
        assert self.extents.largest == max(lengths, default=0)
        ends = FIRST + PAGES
        at_end = next(
            (n for n in range(PAGES) if ends - 1 - n not in self.free or (n and (ends - n) % BARRIER == 0)), 0
        )
        assert self.extents.free_at_end == at_end
        at_start = next(
            (n for n in range(PAGES) if FIRST + n not in self.free or (n and (FIRST + n) % BARRIER == 0)), 0
        )
        assert self.extents.free_at_start == at_start

    def teardown(self):
        held = set(range(FIRST, FIRST + PAGES)) - self.free
        for page in held:  # page by page: merging must find every neighbour
            self.extents.give(page, 1)
        assert self.extents.free == PAGES
        assert self.extents.count == 4  # [10, 32) [32, 64) [64, 96) [96, 100)
        assert self.extents.largest == 32


def _without(values, value):
    rest = list(values)
    rest.remove(value)
    return rest


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_all_given_back_is_one_extent_again():
    extents = Extents(0, 100, barrier=1000)
    starts = [extents.take(7) for _ in range(14)]
    for start in starts[::2] + starts[1::2]:
        extents.give(start, 7)
    assert (extents.count, extents.largest, extents.free) == (1, 100, 100)


def test_nothing_to_hand_out():
    extents = Extents(5, 0, barrier=10)
    assert extents.take(1) is None
    assert (extents.free, extents.largest, extents.free_at_start, extents.free_at_end) == (0, 0, 0, 0)

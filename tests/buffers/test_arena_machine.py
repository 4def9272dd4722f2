"""The arena against a plain model: who holds which bytes, how often, and what must be left."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier.buffers import PAGE, Arena

PAGES, STAGING = 24, 4
BORDER = (PAGES - STAGING) * PAGE


class ArenaMachine(RuleBasedStateMachine):
    held = Bundle("held")  # one per reference the test holds
    views = Bundle("views")  # one-element lists, so that the view can be dropped

    def __init__(self):
        super().__init__()
        self.arena = Arena(PAGES * PAGE, staging=STAGING * PAGE, pin=False)
        self.live = {}  # slot -> [offset, size, references, entry, mark]
        self.marks = 0
        self.high_water = 0
        self.boxes = []
        self.owned = {}  # slot -> its living owned views, which hold one reference together

    def used(self):
        return sum(row[1] for row in self.live.values())

    @rule(target=held, pages=st.integers(1, PAGES), odd=st.integers(0, PAGE - 1), entry=st.booleans())
    def allocate(self, pages, odd, entry):
        slot = self.arena.try_allocate(pages * PAGE - odd, entry=entry)
        if slot is None:
            assert not self.fits(pages, entry=entry)
            return multiple()
        assert slot.size == pages * PAGE
        self.marks += 1
        self.live[slot] = [slot.offset, slot.size, 1, entry, self.marks % 251]
        self.paint(slot)
        self.high_water = max(self.high_water, self.used())
        return slot

    def fits(self, pages, *, entry):
        """Whether a run of free pages is long enough, looking at every page."""
        busy = set()
        for offset, size, *_ in self.live.values():
            busy |= set(range(offset // PAGE, (offset + size) // PAGE))
        run = 0
        for page in range(PAGES - STAGING if entry else PAGES):
            run = 0 if page in busy else run + 1
            if run >= pages:
                return True
        return False

    @rule(target=held, slot=held)
    def retain(self, slot):
        slot.retain()
        self.live[slot][2] += 1
        return slot

    @rule(slot=consumes(held))
    def release(self, slot):
        slot.release()
        self.unref(slot)

    def unref(self, slot):
        self.live[slot][2] -= 1
        if not self.live[slot][2]:
            del self.live[slot]

    @rule(target=views, slot=held)
    def own(self, slot):
        self.owned[slot] = self.owned.get(slot, 0) + 1
        self.live[slot][2] += self.owned[slot] == 1
        self.boxes.append([slot, slot.owned_view()])
        return self.boxes[-1]

    @rule(view=consumes(views))
    def drop_view(self, view):
        slot = view[0]
        view.clear()
        self.owned[slot] -= 1
        if not self.owned[slot]:
            self.unref(slot)

    @rule(slot=held, pages=st.integers(1, PAGES))
    def trim(self, slot, pages):
        row = self.live[slot]
        if row[2] > 1 or pages * PAGE > row[1]:
            return
        slot.trim(pages * PAGE)
        row[1] = pages * PAGE
        self.paint(slot)

    @rule(slot=held)
    def become_entry(self, slot):
        row = self.live[slot]
        outside = row[0] + row[1] <= BORDER
        assert slot.become_entry() is outside
        row[3] = outside

    def paint(self, slot):
        mark = self.live[slot][4]
        slot.view()[:] = bytes([mark]) * slot.size

    @invariant()
    def accounts_are_exact(self):
        stats = self.arena.stats()
        assert stats.used == self.used()
        assert stats.free == PAGES * PAGE - self.used()
        assert stats.slots == len(self.live)
        assert stats.entries == sum(row[1] for row in self.live.values() if row[3])
        assert stats.high_water == self.high_water
        assert all(slot.references == row[2] for slot, row in self.live.items())
        assert all(row[0] + row[1] <= BORDER for row in self.live.values() if row[3])

    @invariant()
    def nobody_wrote_to_another(self):
        for slot, row in self.live.items():
            view = slot.view()
            assert view[0] == view[row[1] // 2] == view[-1] == row[4]

    def teardown(self):
        for box in self.boxes:
            box.clear()
        for slot in self.live:
            while slot.references:
                slot.release()
        stats = self.arena.stats()
        assert (stats.used, stats.entries, stats.slots) == (0, 0, 0)
        assert stats.largest_free == PAGES * PAGE  # everything has merged again


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""What a compaction keeps: every entry in its order, and deletions that somebody may not have heard of."""

import random

from kvtier.keys.names import name_of
from kvtier.tier.index import NAMELESS, new_entry
from kvtier.tier.journal import (
    MAX_RECORD,
    Cleared,
    Deleted,
    TierJournal,
    late_news,
    news,
    replay,
    snapshot,
    unframe,
)


class Log:
    """A journal's medium that is one log."""

    def __init__(self):
        self.log = b""

    async def append_journal(self, records):
        self.log += records


def entries(count):
    choose = random.Random(3)
    made = []
    for i in range(count):
        text = "ü" * choose.choice([1, 20, 1000]) + str(i)
        parent = made[-1].key if made and i % 3 else None
        made.append(new_entry(text, i, parent=parent, lossy=i % 2 == 0, priority=i - 5))
    return made


def test_a_snapshot_tells_all_in_order_in_records_that_can_be_read():
    known = entries(1000)
    log = snapshot(known, lambda _: True)
    found = replay([log])
    assert list(found) == [name_of(entry.key) for entry in known]
    assert list(found.values()) == [(e.key, e.parent, e.lossy, e.priority) for e in known]
    records = list(unframe(log))
    assert len(records) < 40
    assert max(len(str(record)) for record in records) < MAX_RECORD


def test_a_snapshot_leaves_out_what_is_not_held_or_has_no_key():
    known = [*entries(3), new_entry(NAMELESS + "x-1", 1)]
    assert list(replay([snapshot(known, lambda entry: entry.size != 1)])) == [name_of(known[i].key) for i in (0, 2)]
    assert snapshot([], lambda _: True) == b""


async def test_uses_and_departures_behind_a_snapshot_count():
    known = entries(4)
    medium = Log()
    journal = TierJournal(medium)
    medium.log = snapshot(known, lambda _: True)
    journal.note(known[1], came=False)
    journal.used(known[0].name)
    await journal.append()
    assert list(replay([medium.log])) == [known[i].name for i in (2, 3, 0)]


def test_a_child_shares_its_parents_text():
    parent, child = new_entry("parent" * 10, 1), new_entry("child", 1, parent="parent" * 10)
    for order in ([parent, child], [child, parent]):
        found = replay([snapshot(order, lambda _: True)])
        assert found[child.name][1] is found[parent.name][0]


def test_late_deletions_are_told_on_and_old_ones_are_not():
    medium = Log()
    journal = TierJournal(medium)
    items = [Deleted(("old",), 99.0), Deleted(tuple(map(str, range(2500))), 100.0), Cleared("c/", 101.0)]
    for item in items:
        journal.announce(item)
    log = b"".join(journal._records) + snapshot(entries(10), lambda _: True)
    kept = list(news(late_news([log], 100.0)))
    assert [key for item in kept[:-1] for key in item.keys] == list(map(str, range(2500)))
    assert {item.when for item in kept[:-1]} == {100.0}
    assert kept[-1] == items[-1]

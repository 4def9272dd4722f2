"""Bugs that somebody could have made, as a replacement or two in one function each: what the simulation must notice."""

from __future__ import annotations
import __future__ as futures

import importlib
import inspect
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """In the function `where` ("module:name" or "module:Class.name") the text `old` becomes `new`."""

    where: str
    old: str
    new: str

    def apply(self, monkeypatch) -> None:
        module_name, path = self.where.split(":")
        module = importlib.import_module(module_name)
        owner = module
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part)
        found = inspect.getattr_static(owner, name)
        function = found.fget if isinstance(found, property) else found
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.where} has changed: plant the bug anew"
        flags = futures.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<{self.where}>", "exec", flags=flags)
        names: dict[str, object] = {}
        exec(code, module.__dict__, names)
        monkeypatch.setattr(owner, name, names[name])


class Plant:
    """One bug. Where the engine has a second guard against its harm, the guard is taken away too.

    `seed` is one that showed it when it was planted: tried first.
    """

    def __init__(self, name: str, *edits: str | Edit, seed: int = 0) -> None:
        self.name = name
        self.edits = edits if isinstance(edits[0], Edit) else (Edit(*edits),)
        self.seed = seed

    def apply(self, monkeypatch) -> None:
        for edit in self.edits:
            edit.apply(monkeypatch)


NO_TOMBSTONES = Edit(
    "kvtier.store.tombstones:Tombstones.outdated",
    "if created < self._keys.get(key, 0.0):",
    "return False\n    if False:",
)

PLANTS = (
    Plant(
        "resurrection: a write does not look whether its key was deleted meanwhile",
        "kvtier.tier.writing:_publish",
        "if writing.claim.stale:",
        "if False:",
    ),
    Plant(
        "resurrection: what was deleted while it was read is demoted",
        Edit("kvtier.store.movement:Movement._demote_from_medium", " and tier.current(entry)", ""),
        NO_TOMBSTONES,
    ),
    Plant(
        "promotion of what was put anew or deleted while it was read",
        Edit("kvtier.store.flights:Flights._run", " and not flight.claim.stale", ""),
        NO_TOMBSTONES,
    ),
    Plant(
        "a put does not tell older operations that they are overtaken",
        "kvtier.store.placing:Placing._make_way",
        "engine.generations.change(put.key)",
        "pass",
    ),
    Plant(
        "a put leaves the old value in the tiers below",
        "kvtier.store.placing:Placing._make_way",
        "for tier in engine.tiers if",
        "for tier in () if",
    ),
    Plant(
        "a get joins a read begun before the last put",
        "kvtier.store.placing:Placing._publish",
        "engine.flights.close_boarding(put.key)",
        "pass",
    ),
    Plant(
        "a get joins a read begun before the delete",
        Edit("kvtier.store.removal:_forget", "engine.flights.close_boarding(key)", "pass"),
        NO_TOMBSTONES,
    ),
    Plant(
        "double accounting when a value is replaced",
        "kvtier.tier.ledger:Ledger.add",
        "self.index.remove(older)",
        "del self.index.entries[older.key]",
    ),
    Plant(
        "an eviction never credits its bytes",
        "kvtier.tier.stored:StoredTier._unlinked",
        "self.ledger.condemned -= size",
        "pass",
    ),
    Plant(
        "a reservation is never given back",
        "kvtier.tier.writing:_room",
        "ledger.reserved -= growth",
        "pass",
    ),
    Plant(
        "eviction forgets to evict",
        "kvtier.tier.memory:MemoryTier.keep",
        "self.evict(victim)",
        "pass",
    ),
    Plant(
        "lost wake-up: a writer stops after one value",
        "kvtier.writer:Writer._run",
        "while self._queue:",
        "if self._queue:",
    ),
    Plant(
        "an entry leaves the books though another one has its place",
        "kvtier.tier.index:TierIndex.remove",
        "self.entries.get(entry.key) is not entry",
        "entry.key not in self.entries",
    ),
    Plant(
        "a removal takes what was written after it was asked for",
        "kvtier.tier.stored:StoredTier._replaced",
        "there is not None and there is not entry",
        "False",
    ),
    Plant(
        "a slot goes back while a late read still fills it",
        Edit("kvtier.tier.reading:read", "slot.retain()", "pass"),
        Edit("kvtier.tier.reading:_read_job", "slot.release()", "pass"),
    ),
    Plant(
        "the cancelled caller's memory is filled after its get has ended",
        "kvtier.store.chunks:ChunkStore._deliver",
        "await engine.services.workers.run(_copy_out, gate_of_call(), header.segments, value.views(), targets)",
        "await __import__('asyncio').shield(engine.services.supervisor.spawn(engine.services.workers.run(\n"
        "                _copy_out, gate_of_call(), header.segments, value.views(), targets), name='copy'))",
    ),
    Plant(
        "the cancelled put gives its slot back while the copy still runs",
        "kvtier.store.placing:Placing._snapshot",
        "await self._engine.services.workers.run(snapshot, self._gate, [(item.put, item.value) for item in batch])",
        "await __import__('asyncio').shield(self._engine.services.supervisor.spawn(self._engine.services.workers.run(\n"
        "            snapshot, self._gate, [(item.put, item.value) for item in batch]), name='copy'))",
    ),
    Plant(
        "a late answer is believed although the key changed meanwhile",
        Edit(
            "kvtier.tier.reading:probe",
            "if name_of(key) not in touched and name_of(key) not in tier.unremoved:",
            "if True:",
        ),
        NO_TOMBSTONES,
    ),
    Plant(
        "what could not be removed is found again",
        Edit("kvtier.tier.stored:StoredTier.own_affair", " or name in self.unremoved", ""),
        Edit("kvtier.tier.reading:probe", " and name_of(key) not in tier.unremoved", ""),
        NO_TOMBSTONES,
    ),
    Plant(
        "a write that failed is taken for one that never happened",
        "kvtier.tier.stored:StoredTier.doubt",
        "self.unremoved[entry.name] = entry",
        "return",
    ),
    Plant(
        "flush reports success for writes that were dropped",
        "kvtier.store.upkeep:Upkeep._since_last",
        "failed=dropped - self._dropped.get(tier.name, 0)",
        "failed=0",
    ),
    Plant(
        "a clear passes over what is being written",
        "kvtier.concurrency.generations:Generations.clear",
        "self._note(self._cleared, prefix)",
        "pass",
    ),
    Plant(
        "a get waits for a hanging tier beyond its deadline",
        "kvtier.store.loads:Loads.value",
        "flight.wait(deadline.remaining())",
        "flight.wait(3600.0)",
    ),
    Plant(
        "a reader that leaves takes the value from the others",
        "kvtier.store.flights:Flight._drop_value_if_unread",
        "self._readers == 0 and ",
        "",
    ),
    Plant(
        "a claim is never ended",
        "kvtier.tier.writing:_write_job",
        "claim.end()",
        "pass",
    ),
    Plant(
        "a hit in memory is counted twice",
        "kvtier.store.loads:Loads._begin",
        "counters.hits += 1",
        "counters.hits += 2",
    ),
    Plant(
        "an expired value is served",
        "kvtier.tier.ledger:Ledger.find",
        "if entry is None or (entry.expires is not None and self.expired(entry)):",
        "if entry is None:",
    ),
)

"""Clients of a ChunkStore: puts, gets, deletes and the rest in a seeded order, noting what they were told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.clients import Client, Clients
from simulation.history import Promise
from simulation.values import KINDS, TORN

from kvtier.errors import BackendError, PartialDeleteError
from kvtier.store.chunks import ChunkStore
from kvtier.store.removal import clear_prefix

if TYPE_CHECKING:
    import random

    from simulation.world import Life, World

SPACE = f"{7:016x}/{0:016x}/"  # half of the keys look like KV keys, so that shared media can be cleared by prefix


class ChunkClients(Clients):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.keys = [f"{SPACE}{n:032x}" if n % 2 else f"key {n}" for n in range(world.plan.keys)]
        self.kinds = {key: KINDS[n % len(KINDS)] for n, key in enumerate(self.keys)}

    def client(self, life: Life, name: int, rng: random.Random) -> ChunkClient:
        return ChunkClient(self, life, name, rng)

    def number_of(self, key: str, blob: object) -> int:
        return self.kinds[key].number_of(blob)

    async def look(self, life: Life, key: str) -> int:
        blob = await ChunkStore(life.engine).get(key, deadline_seconds=60.0)
        return 0 if blob is None else self.number_of(key, blob)


class ChunkClient(Client):
    def __init__(self, clients: ChunkClients, life: Life, name: int, rng: random.Random) -> None:
        super().__init__(clients, life, name, rng)
        self._all = clients
        self._store = ChunkStore(life.engine)

    def _key(self) -> str:
        return self._rng.choice(self._all.keys)

    def _some_keys(self, *, twice: bool = False) -> list[str]:
        keys = self._rng.sample(self._all.keys, self._rng.randint(1, len(self._all.keys)))
        return [*keys, keys[0]] if twice and self._rng.random() < 0.2 else keys

    # --- writing

    async def put(self, wait: str | None = None) -> None:
        key = self._key()
        ttl = self._ttl()
        change, source = self._begin_put(key)
        label = f"put {key[-8:]} {change.value} {wait or ''}"
        result, error = await self._call(label, self._store.put, key, source.blob, wait=wait, ttl_seconds=ttl)
        self._end_put(label, change, source, result, error, ttl, wait)

    async def put_durable(self) -> None:
        await self.put(wait="durable" if self._world.media else None)

    async def put_many(self) -> None:
        ttl = self._ttl()
        begun = {key: self._begin_put(key) for key in self._some_keys()}
        blobs = {key: source.blob for key, (_, source) in begun.items()}
        label = "put_many " + " ".join(f"{key[-8:]} {change.value}" for key, (change, _) in begun.items())
        results, error = await self._call(label, self._store.put_many, blobs, ttl_seconds=ttl)
        for key, (change, source) in begun.items():
            self._end_put(label, change, source, results[key] if results is not None else None, error, ttl, None)

    def _begin_put(self, key: str):
        change = self._history.change("put", key, self._life.number, value=self._history.new_value())
        return change, self._all.kinds[key].make(change.value, self._rng.randint(1, 3))

    def _end_put(self, label, change, source, result, error, ttl, wait) -> None:
        change.stop = self._history.moment()
        self._all.watch(label, source)
        if ttl is not None:
            change.expires = self._world.loop.time() + ttl
        if isinstance(error, BackendError) and wait is not None:
            return
        if error is not None:
            self._life.unexpected(label, error)
            return
        item = result.chunks[0]
        change.took, change.reason = item.status in {"stored", "queued", "present"}, item.reason
        if wait is not None:
            promise = Promise(change.key, change.value, self._life.number, change.start, "put")
            self._history.promises.append(promise)

    # --- reading

    async def get(self) -> None:
        key = self._key()
        start, time = self._history.moment(), self._world.loop.time()
        result, error = await self._call(f"get {key[-8:]}", self._store.get, key)
        if error is not None:
            self._life.unexpected("get", error)
            return
        self._note(key, start, time, result)

    async def get_many(self) -> None:
        keys = self._some_keys(twice=True)
        start, time = self._history.moment(), self._world.loop.time()
        results, error = await self._call(f"get_many {len(keys)}", self._store.get_many, keys)
        if error is not None:
            self._life.unexpected("get_many", error)
            return
        for key, result in zip(keys, results, strict=True):
            self._note(key, start, time, result)

    async def get_into(self) -> None:
        keys = [key for key in self._all.keys if self._all.kinds[key].name != "bytes"]
        if not keys:
            await self.get()
            return
        key = self._rng.choice(keys)
        target = self._all.kinds[key].make(0)
        start, time = self._history.moment(), self._world.loop.time()
        label = f"get_into {key[-8:]}"
        result, error = await self._call(label, self._store.get, key, into=target.blob)
        if error is not None:
            self._life.unexpected(label, error)
        else:
            self._note(key, start, time, result, hold=False)
        self._all.watch(label, target)

    def _note(self, key: str, start: int, time: float, blob, *, hold: bool = True) -> None:
        number = 0 if blob is None else self._all.number_of(key, blob)
        self._world.trace.note(f"    {self._name} {key[-8:]} -> {number}")
        if number == TORN:
            self._world.problem(f"K1: get of {key} gave a mix or something else: {blob!r}")
            return
        self._read(key, start, time, number, there=blob is not None)
        if hold and number and self._rng.random() < 0.3:
            self._all.hold(key, blob, number)

    async def exists(self) -> None:
        key = self._key()
        start, time = self._history.moment(), self._world.loop.time()
        there, error = await self._call(f"exists {key[-8:]}", self._store.exists, key)
        if error is not None:
            self._life.unexpected("exists", error)
            return
        self._read(key, start, time, None, there=there)

    # --- removing

    async def delete(self) -> None:
        await self.delete_many([self._key()])

    async def delete_many(self, keys: list[str] | None = None) -> None:
        await self._remove(f"delete {keys}", keys or self._some_keys(twice=True), self._store.delete_many)

    async def clear(self) -> None:
        keys = [key for key in self._all.keys if key.startswith(SPACE)]

        async def clear(_keys, *, deadline_seconds):
            await clear_prefix(self._life.engine, SPACE, self._life.engine.begin(deadline_seconds))

        await self._remove("clear", keys, clear)

    async def _remove(self, label: str, keys: list[str], method) -> None:
        changes = [self._history.change("delete", key, self._life.number) for key in keys]
        label = f"{label} {[key[-8:] for key in keys]}"
        _, error = await self._call(label, method, keys)
        self._removed(changes, error, partial=isinstance(error, PartialDeleteError))
        if error is not None and not isinstance(error, PartialDeleteError):
            self._life.unexpected(label, error)

    # --- the store as a whole

    async def flush(self) -> None:
        start, complete = await super().flush()
        if not complete or not self._world.media:
            return
        life = self._life.number
        for key in self._all.keys:
            changes = self._history.of(key)
            puts = [c for c in changes if c.kind == "put" and c.took and c.stop < start and c.epoch == life]
            if puts:
                last = max(puts, key=lambda c: c.stop)
                self._history.promises.append(Promise(key, last.value, life, start, "flush"))

    async def list(self) -> None:
        async def keys(*, deadline_seconds):
            return [entry.key async for entry in self._store.list(deadline_seconds=deadline_seconds)]

        found, error = await self._call("list", keys)
        if error is not None:
            self._life.unexpected("list", error)
        elif len(found) != len(set(found)):
            self._world.problem(f"list gave a key twice: {found}")
        elif not set(found) <= set(self._all.keys):
            self._world.problem(f"list gave what is no key: {found}")

"""Clients of a KVStore: prompts that share beginnings, full and windowed layer groups, every call it has."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from simulation.clients import Client, Clients
from simulation.values import TORN, Source

from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec
from kvtier.errors import BackendError, PartialDeleteError
from kvtier.keys import Namespace
from kvtier.store.kv import KVStore
from kvtier.store.requests import GetRequest

if TYPE_CHECKING:
    import random

    from simulation.world import Life, World

CHUNK = 4  # tokens
MOST_TOKENS = 22
SHARED_TOKENS = 9  # at the beginning of every second prompt
WINDOW = 7
SPEC = TensorSpec(heads=1, dim=4, dtype="float32")
TENSORS = {"k": SPEC, "v": SPEC}
FULL = LayerGroup("full", [0, 2], TENSORS)
SLIDING = LayerGroup("sliding", [1], TENSORS, window=WINDOW)


@dataclass(frozen=True)
class Chunk:
    group: str
    first: int
    stop: int


class KVClients(Clients):
    """A chunk's key in the history is its group and the prompt up to its end, under a short name."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        groups = [FULL, SLIDING] if world.plan.seed % 3 == 0 else [FULL]
        self.layout = KVLayout(groups=groups, axes="LTHD" if world.plan.seed % 2 else "LHTD")
        self.namespace = Namespace(model="simulated", revision="1")
        self.prompts = [self._prompt(n) for n in range(world.plan.keys)]
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}

    def _prompt(self, n: int) -> list[int]:
        shared = [n % 2] * SHARED_TOKENS
        return shared + [100 + n] * (MOST_TOKENS - SHARED_TOKENS)

    def name(self, chunk: Chunk, tokens: list[int]) -> str:
        key = (chunk.group, tuple(tokens[: chunk.stop]))
        return self._names.setdefault(key, f"{chunk.group}{len(self._names)}:{chunk.first}-{chunk.stop}")

    def store(self, life: Life) -> KVStore:
        return KVStore(life.engine, namespace=self.namespace, layout=self.layout, chunk_tokens=CHUNK)

    def client(self, life: Life, name: int, rng: random.Random) -> KVClient:
        return KVClient(self, life, name, rng)

    def number_of(self, key: str, blob: object) -> int:
        return _number_in(blob)

    async def look(self, life: Life, key: str) -> int:
        raise AssertionError(f"no promise was made for {key}")

    def token_axis(self) -> int:
        return self.layout.axes.index("T")

    def make(self, number: int, tokens: int) -> Kv:
        """Return KV of `number` for so many tokens, in memory that can be scribbled over."""
        kv, sources = {}, []
        for group in self.layout.groups:
            held = tokens if group.window is None else min(tokens, group.window - 1)
            shape = {"L": len(group.layers), "T": held, "H": 1, "D": 4}
            kv[group.name] = {}
            for name in TENSORS:
                size = shape["L"] * held * 4
                memory = bytearray(4 * max(size, 1))
                tensor = torch.frombuffer(memory, dtype=torch.float32)[:size].view(
                    [shape[axis] for axis in self.layout.axes]
                )
                tensor.fill_(number)
                kv[group.name][name] = tensor
                sources.append(Source(tensor, memory))
        return Kv(kv if len(kv) > 1 else next(iter(kv.values())), sources)


@dataclass(frozen=True)
class Kv:
    kv: dict
    sources: list[Source]


class KVClient(Client):
    def __init__(self, clients: KVClients, life: Life, name: int, rng: random.Random) -> None:
        super().__init__(clients, life, name, rng)
        self._all = clients
        self._store = clients.store(life)
        self.put_many = self.put
        self.get_into = self.get
        self.delete_many = self.delete

    def _tokens(self) -> list[int]:
        prompt = self._rng.choice(self._all.prompts)
        return prompt[: self._rng.randint(1, MOST_TOKENS)]

    def _groups(self):
        return self._all.layout.groups

    # --- writing

    async def put(self, wait: str | None = None) -> None:
        tokens = self._tokens()
        start = self._rng.choice((0, 0, 0, CHUNK, self._rng.randint(0, len(tokens))))
        start = min(start, len(tokens))
        partial, ttl, number = self._rng.random() < 0.2, self._ttl(), self._history.new_value()
        given = self._all.make(number, len(tokens) - start)
        changes = [
            self._history.change("put", self._all.name(chunk, tokens), self._life.number, value=number)
            for chunk in self._stored(tokens, start, partial=partial)
        ]
        label = f"put {tokens[-1]}:{len(tokens)} from {start} {number} {wait or ''}"
        result, error = await self._call(
            label, self._store.put, tokens, given.kv, start=start, wait=wait, ttl_seconds=ttl, partial=partial
        )
        for source in given.sources:
            self._all.watch(label, source)
        stop, time = self._history.moment(), self._world.loop.time()
        for change in changes:
            change.stop = stop
            change.took = result is not None and not result.count("dropped")
            if ttl is not None:
                change.expires = time + ttl
        if error is not None and not (wait is not None and isinstance(error, BackendError)):
            self._life.unexpected(label, error)

    async def put_durable(self) -> None:
        await self.put(wait="durable" if self._world.media else None)

    def _stored(self, tokens: list[int], start: int, *, partial: bool) -> list[Chunk]:
        """Return the chunks that a put of [start, end) may store."""
        end = len(tokens) if partial else len(tokens) // CHUNK * CHUNK
        chunks = []
        for group in self._groups():
            held = 0 if group.window is None else len(tokens) - min(len(tokens) - start, group.window - 1)
            first = -(-start // CHUNK) * CHUNK
            spans = [(at, min(at + CHUNK, end)) for at in range(first, end, CHUNK)]
            chunks += [Chunk(group.name, at, stop) for at, stop in spans if at >= held]
        return chunks

    # --- reading

    async def get(self) -> None:
        tokens = self._tokens()
        start = self._rng.choice((0, 0, self._rng.randint(0, MOST_TOKENS)))
        most = self._rng.choice((None, None, len(tokens) - 1))
        out = self._all.make(0, max(0, len(tokens) - start)) if self._rng.random() < 0.4 else None
        since = self._now()
        label = f"get {tokens[-1]}:{len(tokens)} from {start}"
        hit, error = await self._call(
            label, self._store.get, tokens, start=start, max_tokens=most, out=out.kv if out is not None else None
        )
        if error is not None:
            self._life.unexpected(label, error)
        else:
            cap = len(tokens) if most is None else min(most, len(tokens))
            self._note_hit(tokens, start, cap, since, hit, hold=out is None)
        for source in out.sources if out is not None else ():
            self._all.watch(label, source)

    async def get_many(self) -> None:
        await self._rng.choice((self._get_many, self._lease, self._stream, self._prefetch, self._touch, self._pin))()

    async def _get_many(self) -> None:
        prompts = [self._tokens() for _ in range(self._rng.randint(1, 4))]
        since = self._now()
        requests = [tokens if self._rng.random() < 0.5 else GetRequest(tokens) for tokens in prompts]
        hits, error = await self._call(f"get_many {len(prompts)}", self._store.get_many, requests)
        if error is not None:
            self._life.unexpected("get_many", error)
            return
        for tokens, hit in zip(prompts, hits, strict=True):
            self._note_hit(tokens, 0, len(tokens), since, hit)

    async def _lease(self) -> None:
        tokens = self._tokens()
        since = self._now()

        async def lease(*, deadline_seconds):
            async with self._store.lease(tokens, deadline_seconds=deadline_seconds) as leased:
                return [(chunk.group, chunk.start, chunk.stop, chunk.kv) for chunk in leased.chunks]

        chunks, error = await self._call(f"lease {tokens[-1]}:{len(tokens)}", lease)
        if error is not None:
            self._life.unexpected("lease", error)
            return
        for group, first, stop, kv in chunks:
            self._note_chunk(Chunk(group, first, stop), tokens, since, kv)

    async def _stream(self) -> None:
        tokens = self._tokens()
        since = self._now()
        by = self._rng.choice(("chunk", "layer"))

        async def stream(*, deadline_seconds):
            async with contextlib.aclosing(
                self._store.stream(tokens, by=by, deadline_seconds=deadline_seconds)
            ) as parts:
                return [part async for part in parts]

        parts, error = await self._call(f"stream {tokens[-1]}:{len(tokens)} by {by}", stream)
        if error is not None:
            self._life.unexpected("stream", error)
            return
        if by == "layer":
            return
        for part in parts:
            for first, stop in _cut(part.start, part.stop):
                kv = self._narrow(part.kv, first - part.start, stop - first)
                self._note_chunk(self._chunk(part.group, tokens, first), tokens, since, kv)

    async def _prefetch(self) -> None:
        tokens = self._tokens()
        held, error = await self._call(f"prefetch {tokens[-1]}:{len(tokens)}", self._store.prefetch, tokens)
        if error is not None:
            self._life.unexpected("prefetch", error)
        elif not 0 <= held <= len(tokens):
            self._world.problem(f"prefetch says {held} of {len(tokens)} tokens")

    async def _touch(self) -> None:
        tokens, ttl = self._tokens(), self._ttl()

        async def touch(*, deadline_seconds):
            return await self._store.touch(tokens, ttl_seconds=ttl)

        changes = []
        if ttl is not None:  # what it touches lives at least so long: as good as a put of what is there
            keys = self._stored_anywhere(tokens, 0)
            changes = [self._history.change("touch", key, self._life.number) for key in keys]
        _, error = await self._life.call(
            f"{self._name} touch", touch(deadline_seconds=None), self._world.plan.deadline_seconds, None
        )
        for change in changes:
            change.stop = self._history.moment()
            change.expires = self._world.loop.time() + ttl
        if error is not None:
            self._life.unexpected("touch", error)

    async def _pin(self) -> None:
        tokens = self._tokens()

        async def pin(*, deadline_seconds):
            if self._rng.random() < 0.3:
                return await self._store.unpin(tokens)
            return await self._store.pin(tokens, ttl_seconds=self._rng.choice((0.05, 1.0)))

        _, error = await self._life.call(
            f"{self._name} pin", pin(deadline_seconds=None), self._world.plan.deadline_seconds, None
        )
        if error is not None:
            self._life.unexpected("pin", error)

    def _now(self) -> tuple[int, float]:
        return self._history.moment(), self._world.loop.time()

    def _note_hit(self, tokens, start, cap, since, hit, *, hold: bool = True) -> None:
        """Take a hit apart into its chunks; the first chunk that it lacks is a miss."""
        length = 0 if hit is None else hit.num_tokens
        if hit is not None and not start < length <= cap:
            self._world.problem(f"a hit of {length} tokens for [{start}, {cap})")
        for group in self._groups():
            if hit is None:
                continue
            kv = hit.kv[group.name] if len(self._groups()) > 1 else hit.kv
            at = start if group.window is None else max(start, length - (group.window - 1))
            for first, stop in _cut(at, length):
                part = self._narrow(kv, first - at, stop - first)
                self._note_chunk(self._chunk(group.name, tokens, first), tokens, since, part)
        if start == 0 and len(self._groups()) == 1 and length < cap // CHUNK * CHUNK and length % CHUNK == 0:
            missed = self._all.name(Chunk("full", length, length + CHUNK), tokens)
            self._note_value(missed, since, 0)
        if hit is not None and hold and self._rng.random() < 0.3 and len(self._groups()) == 1:
            piece = self._narrow(hit.kv, 0, min(CHUNK - start % CHUNK, length - start))
            self._all.hold("hit", piece, _number_in(piece))

    def _chunk(self, group: str, tokens: list[int], position: int) -> Chunk:
        """Return the chunk that holds a position: a stored tail ends with the prompt."""
        first = position // CHUNK * CHUNK
        return Chunk(group, first, min(first + CHUNK, len(tokens)))

    def _note_chunk(self, chunk: Chunk, tokens, since, kv) -> None:
        number = _number_in(kv)
        if number == TORN:
            self._world.problem(f"K1: {chunk} of {tokens[-1]}:{len(tokens)} is a mix: {kv}")
        else:
            self._note_value(self._all.name(chunk, tokens), since, number)

    def _note_value(self, key: str, since: tuple[int, float], number: int) -> None:
        self._world.trace.note(f"    {self._name} {key} -> {number}")
        self._read(key, *since, number, there=bool(number))

    def _narrow(self, kv, offset: int, tokens: int):
        return {name: tensor.narrow(self._all.token_axis(), offset, tokens) for name, tensor in kv.items()}

    async def exists(self) -> None:
        tokens = self._tokens()
        since = self._now()
        length, error = await self._call(f"exists {tokens[-1]}:{len(tokens)}", self._store.exists, tokens)
        if error is not None:
            self._life.unexpected("exists", error)
            return
        for first, _ in _cut(0, length):
            key = self._all.name(self._chunk("full", tokens, first), tokens)
            self._read(key, *since, None, there=True)

    # --- removing

    async def delete(self) -> None:
        tokens = self._tokens()
        start = self._rng.choice((0, 0, self._rng.randint(0, len(tokens))))
        chunks = self._stored_anywhere(tokens, start)
        await self._remove(f"delete {tokens[-1]}:{len(tokens)} from {start}", chunks, tokens, self._store.delete, start)

    def _stored_anywhere(self, tokens: list[int], start: int) -> list[str]:
        spans = [(at, min(at + CHUNK, len(tokens))) for at in range(-(-start // CHUNK) * CHUNK, len(tokens), CHUNK)]
        return [self._all.name(Chunk(g.name, at, stop), tokens) for g in self._groups() for at, stop in spans]

    async def clear(self) -> None:
        async def clear(_tokens, *, start, deadline_seconds):
            await self._store.clear(deadline_seconds=deadline_seconds)

        await self._remove("clear", list(self._all._names.values()), [], clear, 0)

    async def _remove(self, label: str, keys: list[str], tokens: list[int], method, start: int) -> None:
        changes = [self._history.change("delete", key, self._life.number) for key in keys]
        _, error = await self._call(label, method, tokens, start=start)
        partial = isinstance(error, PartialDeleteError)
        self._removed(changes, error, partial=partial)
        if error is not None and not partial:
            self._life.unexpected(label, error)

    async def list(self) -> None:
        async def keys(*, deadline_seconds):
            return [entry.key async for entry in self._store.list(deadline_seconds=deadline_seconds)]

        found, error = await self._call("list", keys)
        if error is not None:
            self._life.unexpected("list", error)
        elif len(found) != len(set(found)):
            self._world.problem(f"list gave a key twice: {found}")


def _cut(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut [start, stop) at the ends of chunks."""
    ends = [end for end in range(CHUNK, stop, CHUNK) if end > start]
    return list(zip([start, *ends], [*ends, stop], strict=True)) if start < stop else []


def _number_in(kv) -> int:
    """Return the number of the put that all of it came from, or TORN."""
    if not isinstance(kv, dict) or list(kv) != list(TENSORS):
        return TORN
    numbers = {float(value) for tensor in kv.values() for value in (tensor.min(), tensor.max())}
    return int(numbers.pop()) if len(numbers) == 1 else TORN

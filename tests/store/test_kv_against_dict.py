"""KVStore against a dict and brute force: which length is usable, and every bit of what comes back."""

import asyncio
import itertools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvtier
from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec
from kvtier.keys import group_key
from kvtier.testing.kv_model import DictModel
from kvtier.testing.kv_values import Prompt, assert_same_kv, kv_of

CHUNK = 4
NAMESPACE = kvtier.Namespace(model="org/model", revision="1")
K, V = TensorSpec(2, 3, "int16"), TensorSpec(2, 5, "bfloat16")


def groups(*windows):
    return [
        LayerGroup(f"g{i}", [3 * i, 3 * i + 1, 3 * i + 2][: 1 + i % 3], {"k": K, "v": V}, window=window)
        for i, window in enumerate(windows)
    ]


LAYOUTS = {
    "short-form": KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="bfloat16"),
    "LHTD": KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", axes="LHTD"),
    "mla": KVLayout.mla(num_layers=2, latent_dim=6),
    "mla-LHTD": KVLayout.mla(num_layers=2, latent_dim=6, axes="LHTD"),
    "full-window": KVLayout(groups(None, 6)),
    "window-full-LHTD": KVLayout(groups(6, None), axes="LHTD"),
    "two-full-two-windows": KVLayout(groups(None, None, 3, 10)),
    "window-of-one": KVLayout(groups(None, 1)),
    "window-longer-than-all": KVLayout(groups(None, 100)),
    "windows-only": KVLayout(groups(5, 7)),
}


def config(kind, path):
    memory = {"backend": "pinned-cpu", "capacity": "32MiB"}
    disk = {"backend": "local-disk", "path": str(path), "capacity": "1GiB"}
    tiers = {"memory": [memory], "memory-disk": [memory, disk], "disk": [disk]}[kind]
    return {"chunk_tokens": CHUNK, "tiers": tiers, "memory": {"staging_bytes": "4MiB", "results_bytes": "16MiB"}}


def open_store(kind, path, layout):
    return kvtier.open(config(kind, path), layout=layout, namespace=NAMESPACE)


def given_form(layout, kv):
    """Leave the group out where there is one only: the short form."""
    return next(iter(kv.values())) if len(layout.groups) == 1 else kv


def blank(layout, prompt, *, start, tokens):
    """Return tensors to be filled, with room for `tokens`, whose token axis is a slice of something wider."""
    made = {}
    for group in layout.groups:
        kv = kv_of(layout, prompt, chunk_tokens=CHUNK, take=-1)[group.name]
        made[group.name] = {}
        for name, tensor in kv.items():
            axis = next(s for s in layout.specs(group.name, tokens=1, first_token=0) if s.name == name).axes.index("T")
            shape = list(tensor.shape)
            shape[axis] = tokens + 3
            wide = torch.full(shape, -7, dtype=torch.int64).to(tensor.dtype)
            made[group.name][name] = wide.narrow(axis, 2, tokens)
    return given_form(layout, made)


def keys_of(store, layout, prompt):
    """Return the key of every object of a prompt, as (group, first position) -> key."""
    chain = prompt.prefix().keys(namespace=store._digest, chunk_tokens=CHUNK)
    keys = [*chain.keys, *([chain.partial] if chain.partial else [])]
    return {
        (group.name, i * CHUNK): key if number == 0 else group_key(key, group.name)
        for number, group in enumerate(layout.groups)
        for i, key in enumerate(keys)
    }


# Few tokens and salts, so that prompts share beginnings, and nearly do.
PARTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=11).map(tuple), st.sampled_from(["", "", "s", "t"])),
    min_size=1,
    max_size=3,
).map(lambda parts: Prompt(tuple(parts)))
LINES = st.integers(0, 22).map(lambda length: Prompt(((tuple([0] * length), ""),)))
PROMPTS = st.one_of(LINES, PARTS)


class KVAgainstDict(RuleBasedStateMachine):
    """Puts, gets, deletes and reopenings at random; every answer is compared with the dict's."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.takes = itertools.count()

    @initialize(name=st.sampled_from(sorted(LAYOUTS)), kind=st.sampled_from(["memory", "memory-disk", "disk"]))
    def begin(self, name, kind):
        self.folder = tempfile.TemporaryDirectory()
        self.layout, self.kind = LAYOUTS[name], kind
        self.model = DictModel(self.layout, CHUNK)
        self.prompts = [Prompt((((0,) * 9, ""),))]
        self.open()

    def open(self):
        self.store = open_store(self.kind, Path(self.folder.name) / "tier", self.layout)
        self.run(self.store.__aenter__())

    def run(self, call):
        return self.runner.run(call)

    @rule(data=st.data(), prompt=PROMPTS, partial=st.booleans(), short=st.booleans())
    def put(self, data, prompt, partial, short):
        total = len(prompt.tokens)
        start = data.draw(st.integers(0, total)) if data.draw(st.booleans()) else 0
        take = next(self.takes)
        kv = kv_of(self.layout, prompt, chunk_tokens=CHUNK, first=start, take=take)
        held = {}
        for group in self.layout.groups:
            if group.window is not None and short:
                held[group.name] = min(total - start, group.window - 1)
                for name, tensor in kv[group.name].items():
                    axis = self.axis(group.name, name)
                    kv[group.name][name] = tensor.narrow(axis, total - start - held[group.name], held[group.name])
        result = self.run(self.store.put(prompt.prefix(), given_form(self.layout, kv), start=start, partial=partial))
        new = set(self.model.put(prompt, start=start, held=held, partial=partial, take=take))
        assert len(result.chunks) == len(new), result
        assert not result.count("dropped"), result
        assert result.skipped == (start % CHUNK != 0 and start < total)
        self.prompts.append(prompt)

    def axis(self, group, name):
        specs = self.layout.specs(group, tokens=1, first_token=0)
        return next(spec for spec in specs if spec.name == name).axes.index("T")

    @rule(data=st.data(), other=st.one_of(st.none(), PROMPTS), fill=st.booleans())
    def get(self, data, other, fill):
        prompt = other or data.draw(st.sampled_from(self.prompts))
        total = len(prompt.tokens)
        start = data.draw(st.integers(0, total + 2)) if data.draw(st.booleans()) else 0
        cap = data.draw(st.one_of(st.none(), st.integers(0, total + 2)))
        out, room = None, total
        if fill:
            room = data.draw(st.integers(max(0, total - start), total + 3)) if total else 0
            out = blank(self.layout, prompt, start=start, tokens=room)
        hit = self.run(self.store.get(prompt.prefix(), start=start, max_tokens=cap, out=out))
        wanted = self.model.usable(prompt, cap)
        note(f"get {prompt} start={start} max_tokens={cap}: {wanted} usable")
        if wanted <= start:
            assert hit is None
            return
        assert hit is not None
        assert hit.num_tokens == wanted
        assert hit.complete
        assert not hit.lossy
        assert hit.start == start
        assert_same_kv(hit.kv, self.model.kv(prompt, start=start, length=wanted))

    @rule(data=st.data(), other=st.one_of(st.none(), PROMPTS))
    def exists(self, data, other):
        prompts = [other or data.draw(st.sampled_from(self.prompts)), data.draw(st.sampled_from(self.prompts))]
        cap = data.draw(st.one_of(st.none(), st.integers(0, 24)))
        found = self.run(self.store.exists_many([prompt.prefix() for prompt in prompts], max_tokens=cap))
        assert list(found) == [self.model.usable(prompt, cap) for prompt in prompts]

    @rule(data=st.data())
    def delete(self, data):
        prompt = data.draw(st.sampled_from(self.prompts))
        start = data.draw(st.integers(0, len(prompt.tokens)))
        assert self.run(self.store.delete(prompt.prefix(), start=start)) == self.model.delete(prompt, start=start)

    @rule(data=st.data())
    def delete_one_object(self, data):
        prompt = data.draw(st.sampled_from(self.prompts))
        keys = keys_of(self.store, self.layout, prompt)
        if not keys:
            return
        group, begin = data.draw(st.sampled_from(sorted(keys)))
        there = self.model.things.pop(self.model.thing_with(group, prompt, begin), None) is not None
        assert self.run(self.store.chunks.delete(keys[group, begin])) == there

    @rule()
    def flush(self):
        assert self.run(self.store.flush()).complete

    @precondition(lambda self: self.kind != "memory")
    @rule()
    def reopen(self):
        self.run(self.store.aclose())
        self.open()

    @rule()
    def list_all(self):
        async def listed():
            return [entry.key async for entry in self.store.list()]

        keys = self.run(listed())
        assert len(keys) == len(set(keys)) == len(self.model.things)

    @invariant()
    def books_balance(self):
        async def tiers():
            return self.store.stats().tiers.values()

        for tier in self.run(tiers()) if hasattr(self, "store") else ():
            came = tier.found + tier.written
            went = tier.evicted + tier.deleted + tier.expired + tier.corrupt + tier.vanished
            assert came - went == tier.entries, tier
            outcomes = tier.hits + tier.misses + tier.corrupt + tier.raced + tier.timeouts + tier.errors + tier.skipped
            assert tier.lookups == outcomes, tier

    def teardown(self):
        if hasattr(self, "store"):
            self.run(self.store.aclose())
            self.folder.cleanup()
        self.runner.close()


TestKVAgainstDict = pytest.mark.timeout(600)(KVAgainstDict.TestCase)  # a failure is made smaller, which takes its time
TestKVAgainstDict.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


LONG = Prompt((((0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1), ""),))  # four chunks and a tail of two


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
async def test_each_missing_object_shortens_the_prefix_as_the_contract_says(name, kind, tmp_path):
    layout = LAYOUTS[name]
    async with open_store(kind, tmp_path, layout) as store:
        full = kv_of(layout, LONG, chunk_tokens=CHUNK)
        for group, begin in sorted(keys_of(store, layout, LONG)):
            model = DictModel(layout, CHUNK)
            await store.put(LONG.prefix(), given_form(layout, full), partial=True)
            model.put(LONG, start=0, held={}, partial=True, take=0)
            assert await store.exists(LONG.prefix()) == len(LONG.tokens) == model.usable(LONG)
            assert await store.chunks.delete(keys_of(store, layout, LONG)[group, begin])
            del model.things[model.thing_with(group, LONG, begin)]
            for cap in range(len(LONG.tokens) + 1):
                usable = await store.exists(LONG.prefix(), max_tokens=cap)
                assert usable == model.usable(LONG, cap), (group, begin, cap)
            for start in (0, 1, CHUNK, 2 * CHUNK + 1):
                hit = await store.get(LONG.prefix(), start=start)
                wanted = model.usable(LONG)
                if wanted <= start:
                    assert hit is None
                else:
                    assert hit.num_tokens == wanted
                    assert_same_kv(hit.kv, model.kv(LONG, start=start, length=wanted))


@pytest.mark.parametrize("kind", ["memory", "memory-disk", "disk"])
async def test_every_start_and_every_max_tokens(kind, tmp_path):
    layout = LAYOUTS["two-full-two-windows"]
    model = DictModel(layout, CHUNK)
    async with open_store(kind, tmp_path, layout) as store:
        await store.put(LONG.prefix(), kv_of(layout, LONG, chunk_tokens=CHUNK))
        model.put(LONG, start=0, held={}, partial=False, take=0)
        assert (await store.flush()).complete
        for start, cap in itertools.product(range(18), range(18)):
            hit = await store.get(LONG.prefix(), start=start, max_tokens=cap)
            wanted = model.usable(LONG, cap)
            if wanted <= start:
                assert hit is None, (start, cap)
            else:
                assert hit.num_tokens == wanted == min(cap, 16)
                assert_same_kv(hit.kv, model.kv(LONG, start=start, length=wanted))


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(LAYOUTS)))
@settings(max_examples=150, deadline=None)
def test_the_usable_length_is_the_greatest_that_the_contract_allows(seed, name):
    """Random holes in long prefixes, without a store: only the arithmetic of `PrefixPlan`."""
    from kvtier.store.plan import PrefixPlan

    layout, drawn = LAYOUTS[name], random.Random(seed)
    prompt = Prompt(((tuple(drawn.choices((0, 1), k=drawn.randint(0, 60))), ""),))
    digest = NAMESPACE.fingerprint(layout=layout.describe(), chunk_tokens=CHUNK)
    plan = PrefixPlan(prompt.prefix().keys(namespace=digest, chunk_tokens=CHUNK), layout)
    model = DictModel(layout, CHUNK)
    model.put(prompt, start=0, held={}, partial=drawn.random() < 0.5, take=0)
    for thing in list(model.things):
        if drawn.random() < 0.15:
            del model.things[thing]

    def present(piece):
        return model.thing_with(piece.group, prompt, plan.start(piece.span)) in model.things

    cap = drawn.randint(0, len(prompt.tokens))
    if plan.full:
        run = 0
        while run < len(plan.run()) and present(plan.run()[run]):
            run += 1
        covered = plan.limit_of_run(run)
    else:
        covered = len(prompt.tokens)
    assert plan.usable(min(covered, cap), present) == model.usable(prompt, cap)

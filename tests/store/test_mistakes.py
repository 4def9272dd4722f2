"""Callers' mistakes: each is an error of ours at once, which says what was given; nothing is stored, read or lost."""

import array
import ast
from functools import partial

import numpy
import pytest
import torch

import kvtier
from kvtier.errors import ConfigError, InvalidKeyError, InvalidValueError, KVTierError

TOKENS = list(range(16))


class Other:
    """Something that no call expects."""

    def __repr__(self):
        return "Other()"


def kv(kit):
    return kit.kv(TOKENS)


async def consume(iterator):
    return [item async for item in iterator]


NO_HINTS = ["x", 5, {}, Other(), object]
NO_DEVICES = ["nowhere", -1, Other(), "meta", "cuda:99"]
NO_WAITS = [-1, float("nan"), float("inf"), None, "1", True]
NO_TEXTS = [5, None, b"x", ["a"]]
NO_BATCHES = [None, 5, "key", b"key"]

CALLS = {
    "get hint": (NO_HINTS, lambda store, kit, bad: store.get(TOKENS, hint=bad)),
    "get_many hint": (NO_HINTS, lambda store, kit, bad: store.get_many([kvtier.GetRequest(TOKENS, hint=bad)])),
    "put hint": (NO_HINTS, lambda store, kit, bad: store.put(TOKENS, kv(kit), hint=bad)),
    "touch hint": (NO_HINTS, lambda store, kit, bad: store.touch(TOKENS, hint=bad)),
    "chunks.put hint": (NO_HINTS, lambda store, kit, bad: store.chunks.put("key", b"1", hint=bad)),
    "chunks.put_many hint": (NO_HINTS, lambda store, kit, bad: store.chunks.put_many({"key": b"1"}, hint=bad)),
    "get device": (NO_DEVICES, lambda store, kit, bad: store.get(TOKENS, device=bad)),
    "get wait_seconds": (NO_WAITS, lambda store, kit, bad: store.get(TOKENS, wait_seconds=bad)),
    "put lossy": (["x", 5, None], lambda store, kit, bad: store.put(TOKENS, kv(kit), lossy=bad)),
    "pin ttl_seconds": ([None, 0, "1"], lambda store, kit, bad: store.pin(TOKENS, ttl_seconds=bad)),
    "list prefix": (NO_TEXTS, lambda store, kit, bad: consume(store.list(bad))),
    "chunks.list prefix": (NO_TEXTS, lambda store, kit, bad: consume(store.chunks.list(bad))),
    "get_many": (NO_BATCHES, lambda store, kit, bad: store.get_many(bad)),
    "exists_many": (NO_BATCHES, lambda store, kit, bad: store.exists_many(bad)),
    "chunks.get_many": (NO_BATCHES, lambda store, kit, bad: store.chunks.get_many(bad)),
    "chunks.exists_many": (NO_BATCHES, lambda store, kit, bad: store.chunks.exists_many(bad)),
    "chunks.delete_many": (NO_BATCHES, lambda store, kit, bad: store.chunks.delete_many(bad)),
    "chunks.put_many": ([None, 5, "key", [("key", b"1")]], lambda store, kit, bad: store.chunks.put_many(bad)),
    "chunks.get_many into": ([5, [1]], lambda store, kit, bad: store.chunks.get_many(["key"], into=bad)),
    "clear namespace": (["x", 5, {"model": "m"}], lambda store, kit, bad: store.clear(namespace=bad)),
    "end_session": ([None, 5, ["x"]], lambda store, kit, bad: store.end_session(bad)),
}


@pytest.mark.parametrize("call", sorted(CALLS))
async def test_a_wrong_argument_is_refused(kit, opened, call):
    store = await opened(kit.open(kit.memory(), kit.disk()))
    await store.put(TOKENS, kit.kv(TOKENS), wait="durable")
    await store.chunks.put("key", kit.tensor(1), wait="durable")
    before = kit.resources(store)
    mistakes, make = CALLS[call]
    for mistake in mistakes:
        with pytest.raises((InvalidValueError, InvalidKeyError, ConfigError)) as caught:
            await make(store, kit, mistake)
        assert len(str(caught.value)) > len("so, and not: so")
    del caught
    await kit.until(lambda: kit.resources(store) == before)
    kit.assert_kv(await store.get(TOKENS), TOKENS)
    kit.assert_books_balance(store)


def outs(kit):
    """Memory that no hit can be put into, by what is wrong with it."""
    good = kit.kv(TOKENS)
    flat = torch.zeros(2048, dtype=torch.bfloat16)
    return {
        "None": {"k": None, "v": None},
        "numpy": {name: tensor.float().numpy() for name, tensor in good.items()},
        "one tensor twice": {"k": good["k"], "v": good["k"]},
        "two views of one memory": {"k": flat[:512].view(2, 16, 2, 8), "v": flat[256:768].view(2, 16, 2, 8)},
        "expanded": {"k": good["k"], "v": flat[:1].expand(2, 16, 2, 8)},
        "overlapping itself": {"k": good["k"], "v": flat.as_strided((2, 16, 2, 8), (8, 8, 8, 1))},
    }


@pytest.mark.parametrize(
    "what", ["None", "numpy", "one tensor twice", "two views of one memory", "expanded", "overlapping itself"]
)
async def test_an_out_that_cannot_hold_a_hit_is_refused(kit, opened, what):
    """Elements that share memory would be given what belongs to others."""
    store = await opened(kit.open(kit.memory()))
    await store.put(TOKENS, kit.kv(TOKENS))
    with pytest.raises(InvalidValueError, match=r"out|target"):
        await store.get(TOKENS, out=outs(kit)[what])
    kit.assert_kv(await store.get(TOKENS), TOKENS)


async def test_an_out_of_interleaved_tensors_is_filled(kit, opened):
    """What an engine keeps side by side shares a storage and no element."""
    store = await opened(kit.open(kit.memory()))
    await store.put(TOKENS, kit.kv(TOKENS))
    both = torch.zeros(2, 16, 2, 2, 8, dtype=torch.bfloat16)
    hit = await store.get(TOKENS, out={"k": both[:, :, 0], "v": both[:, :, 1]})
    kit.assert_kv(hit, TOKENS)


@pytest.mark.parametrize(
    ("key", "into"),
    [
        ("tensor", 5),
        ("tensor", numpy.zeros(2048, dtype=numpy.uint8)),
        ("tensor", bytearray(2048)),
        ("tensor", torch.zeros(4096, dtype=torch.uint8).as_strided((2048,), (0,))),
        ("mapping", {"a": None, "b": None}),
        ("mapping", dict.fromkeys("ab", torch.zeros(2048, dtype=torch.uint8))),
        ("bytes", bytearray(3)),
        ("bytes", torch.zeros(3, dtype=torch.uint8)),
    ],
)
async def test_an_into_that_cannot_hold_a_value_is_refused(kit, opened, key, into):
    store = await opened(kit.open_chunks(kit.memory()))
    await store.put_many(
        {"tensor": kit.tensor(1), "mapping": {"a": kit.tensor(1), "b": kit.tensor(2)}, "bytes": b"abc"}
    )
    with pytest.raises(InvalidValueError, match=r"into|target"):
        await store.get(key, into=into)
    assert torch.equal(await store.get("tensor"), kit.tensor(1))


async def test_keys_may_come_from_an_iterator(kit, opened):
    store = await opened(kit.open_chunks(kit.memory()))
    await store.put_many({"a": b"1", "b": b"2"})
    assert await store.get_many(iter("ab")) == [b"1", b"2"]
    assert await store.exists_many(iter("abc")) == [True, True, False]
    assert await store.delete_many(iter("abc")) == [True, True, False]


async def test_views_of_nothing_are_empty_bytes(kit, opened):
    store = await opened(kit.open_chunks(kit.memory()))
    for number, view in enumerate([memoryview(numpy.zeros((0, 3))), memoryview(array.array("d")), memoryview(b"")]):
        await store.put(f"key {number}", view)
        assert await store.get(f"key {number}") == b""


@pytest.mark.parametrize(
    "options",
    [
        {"layout": 5},
        {"layout": {"num_layers": 2}},
        {"namespace": "org/name"},
        {"namespace": {"model": "org/name"}},
        {"observer": 5},
        {"strict": "yes"},
        {"lossless": 1},
    ],
    ids=str,
)
def test_a_wrong_argument_of_open_is_refused(kit, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        kvtier.open(kit.config(kit.memory()), **{"layout": kit.layout, "namespace": kit.namespace, **options})


@pytest.mark.parametrize("options", [{"namespace": "org/name"}, {"layout": 5}], ids=str)
async def test_a_wrong_argument_of_with_namespace_is_refused(kit, opened, options):
    store = await opened(kit.open(kit.memory()))
    with pytest.raises(ConfigError, match=next(iter(options))):
        store.with_namespace(**{"namespace": kit.namespace, **options})


SPEC = "kvtier.TensorSpec(1, 8)"


@pytest.mark.parametrize(
    "layout",
    [
        "kvtier.KVLayout(5)",
        "kvtier.KVLayout([5])",
        "kvtier.KVLayout(num_layers=10**9, num_kv_heads=1, head_dim=8)",
        f"kvtier.LayerGroup('g', None, {{'k': {SPEC}}})",
        "kvtier.LayerGroup('g', 2, 5)",
        "kvtier.LayerGroup('g', 2, {'k': 5})",
    ],
)
def test_a_wrong_layout_is_refused(layout):
    with pytest.raises(ConfigError):
        eval(compile(ast.parse(layout, mode="eval"), "layout", "eval"), {"kvtier": kvtier})


@pytest.mark.parametrize("make", [kvtier.Prefix, partial(kvtier.BlockHashes, tokens_per_hash=4, scheme="s")])
def test_a_wrong_part_of_a_prefix_is_refused(make):
    wrong = {"media": 5} if make is kvtier.Prefix else {"hashes": 5}
    with pytest.raises(InvalidKeyError, match=next(iter(wrong))):
        make(**{"tokens": TOKENS, **wrong} if make is kvtier.Prefix else wrong)


def test_every_one_of_them_is_caught_by_one_name():
    assert all(issubclass(kind, KVTierError) for kind in (InvalidKeyError, InvalidValueError, ConfigError))

"""The adapter on the real store: from memory, from disk after a restart, with every chunk missing in turn."""

import pytest
import torch

import kvtier
from kvtier.adapters.transformers import cached_generate, kv_layout, load_prefix, prefill
from kvtier.errors import InvalidValueError
from kvtier.keys import Prefix, chunk_keys, group_key

NEW = 10


def config(folder, chunk_tokens):
    return {
        "chunk_tokens": chunk_tokens,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "16MiB"},
            {"backend": "local-disk", "path": str(folder), "capacity": "64MiB"},
        ],
    }


def opened(model, folder, chunk_tokens, axes="LHTD"):
    layout = kvtier.KVLayout.from_config(model.config, dtype=model.dtype, axes=axes)
    namespace = kvtier.Namespace.from_model(model)
    return kvtier.open(config(folder, chunk_tokens), namespace=namespace, layout=layout)


@pytest.mark.parametrize("axes", ["LHTD", "LTHD"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
async def test_cold_warm_and_restarted_give_the_same_tokens(kit, tmp_path, kind, axes):
    model = getattr(kit, kind)()
    ids = kit.tokens(5 * kit.chunk + 3)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    seen = []
    for _ in range(2):
        async with opened(model, tmp_path, kit.chunk, axes) as store:
            for _ in range(2):
                out = await cached_generate(model, store, ids, max_new_tokens=NEW, do_sample=False)
                assert torch.equal(out.sequences, expected)
                seen.append((out.num_loaded, *out.tiers))
            assert (await store.flush()).complete
    assert seen == [
        (0,),
        (5 * kit.chunk, "pinned-cpu"),
        (5 * kit.chunk, "local-disk"),
        (5 * kit.chunk, "pinned-cpu"),
    ]


@pytest.mark.parametrize("axes", ["LHTD", "LTHD"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
async def test_logits_from_disk_are_bit_equal_to_the_same_split_never_stored(kit, tmp_path, kind, axes):
    model = getattr(kit, kind)()
    ids = kit.tokens(4 * kit.chunk + 7)
    async with opened(model, tmp_path, kit.chunk, axes) as store:
        cold = await prefill(model, store, ids, step_tokens=kit.chunk)
    async with opened(model, tmp_path, kit.chunk, axes) as store:
        warm = await prefill(model, store, ids, step_tokens=kit.chunk)
    assert (cold.num_loaded, warm.num_loaded) == (0, 4 * kit.chunk)
    assert torch.equal(cold.logits, warm.logits)


async def test_what_the_model_computes_sooner_is_not_loaded_where_that_is_asked_for(kit, tmp_path):
    model = kit.llama()
    ids = kit.tokens(3 * kit.chunk + 1)
    async with opened(model, tmp_path, kit.chunk) as store:
        await prefill(model, store, ids)
        with pytest.raises(InvalidValueError, match="how fast the model computes"):
            await load_prefix(model, store, ids, min_benefit_seconds=0.0)
        for per_token, loaded in ((1e-9, 0), (100.0, 3 * kit.chunk)):
            store.prefill = kvtier.Prefill(linear_seconds=per_token)
            assert (await load_prefix(model, store, ids, min_benefit_seconds=0.0)).num_tokens == loaded
            assert (await load_prefix(model, store, ids)).num_tokens == 3 * kit.chunk


def brute_force(layout, present, chunk, limit):
    """The greatest length for which every layer group has what it needs: the rule, tried for each length."""
    for length in range(limit, 0, -1):
        needed = {
            (group.name, index)
            for group in layout.groups
            for index in range(-(-length // chunk))
            if group.window is None or (index + 1) * chunk > length - (group.window - 1)
        }
        if needed <= present:
            return length
    return 0


@pytest.mark.parametrize("window", [6, 17, 24])
async def test_every_chunk_missing_in_turn(kit, tmp_path, window):
    model = kit.gemma(window=window)
    layout, chunk = kv_layout(model), 8
    ids = kit.tokens(6 * chunk + 2)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    async with opened(model, tmp_path, chunk) as store:
        await prefill(model, store, ids)
        listed = {entry.key async for entry in store.list("")}
        digest = kvtier.Namespace.from_model(model).fingerprint(layout=layout.describe(), chunk_tokens=chunk)
        base = chunk_keys(Prefix(ids[0]), namespace=digest, chunk_tokens=chunk).keys
        names = {}
        for group in layout.groups:
            for index, key in enumerate(base):
                own = group_key(key, group.name)
                names[own if own in listed else key] = (group.name, index)
        assert names.keys() == listed
        for gone, item in names.items():
            assert await store.chunks.delete(gone)
            usable = brute_force(layout, set(names.values()) - {item}, chunk, len(ids[0]) - 1)
            loaded = await load_prefix(model, store, ids)
            assert loaded.num_tokens == usable, f"without {item}"
            again = await prefill(model, store, ids)
            torch.testing.assert_close(again.logits, expected, atol=1e-4, rtol=0)
            if not await store.chunks.exists(gone):  # a chunk that no length needs is not computed again: put it back
                await store.clear()
                await prefill(model, store, ids)


@pytest.mark.parametrize("rows", [1, 2])
async def test_a_prefix_is_loaded_only_if_that_pays(kit, tmp_path, rows):
    model, ids = kit.llama(), kit.tokens(3 * kit.chunk)[:1].repeat(rows, 1)
    async with opened(model, tmp_path, kit.chunk) as store:
        await prefill(model, store, ids)
        store.prefill = kvtier.Prefill(linear_seconds=100.0)
        loaded = await load_prefix(model, store, ids, min_benefit_seconds=1.0)
        assert loaded.num_tokens == 3 * kit.chunk - 1
        assert (await load_prefix(model, store, ids, min_benefit_seconds=1e6)).num_tokens == 0


async def test_two_checkpoints_of_one_shape_never_share(kit, tmp_path):
    first, second = kit.llama(seed=1), kit.llama(seed=2)
    ids = kit.tokens(3 * kit.chunk)
    async with opened(first, tmp_path, kit.chunk) as store:
        await prefill(first, store, ids)
        await store.flush()
    async with opened(second, tmp_path, kit.chunk) as store:
        assert (await load_prefix(second, store, ids)).num_tokens == 0

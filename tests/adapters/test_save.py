"""What a serving loop of its own stores: whole chunks, from caches that still hold them."""

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from kvtier.adapters.transformers import load_prefix, save_prefix
from kvtier.errors import InvalidValueError, UnsupportedCacheLayerError


def run(model, ids, cache=None, recording=False):
    cache = cache or DynamicCache(config=model.config)
    if recording:
        cache.activate_past_recording()
    with torch.no_grad():
        logits = model(ids, cache=cache).logits[:, -1]
    return cache, logits


async def test_an_own_loop_saves_loads_and_goes_on(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(4 * kit.chunk + 3)
    cache, _ = run(llama, ids)
    await save_prefix(llama, store, ids, cache)
    longer = torch.cat([ids, kit.tokens(2 * kit.chunk, seed=5)], dim=1)
    loaded = await load_prefix(llama, store, longer)
    assert loaded.num_tokens == 4 * kit.chunk
    for index in range(3):
        layer, original = loaded.cache.layers[index], cache.layers[index]
        assert torch.equal(layer.keys, original.keys[:, :, : 4 * kit.chunk])
        assert torch.equal(layer.values, original.values[:, :, : 4 * kit.chunk])
    cache, logits = run(llama, longer[:, loaded.num_tokens :], loaded.cache)
    torch.testing.assert_close(logits, run(llama, longer)[1], atol=1e-4, rtol=0)
    await save_prefix(llama, store, longer, cache, start=loaded.num_tokens, lossy=loaded.lossy)
    assert len(store.chunks) == 6
    assert store.puts == [(0, 4 * kit.chunk, False), (4 * kit.chunk, 6 * kit.chunk, False)]


async def test_a_forward_pass_never_writes_into_what_was_loaded(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(3 * kit.chunk + 1)
    await save_prefix(llama, store, ids, run(llama, ids)[0])
    loaded = await load_prefix(llama, store, ids)
    lent = {name: tensor.clone() for name, tensor in loaded.hit.kv["full"].items()}
    assert loaded.cache.layers[0].keys.data_ptr() == loaded.hit.kv["full"]["k"].data_ptr(), (
        "the cache views, it copies not"
    )
    llama.generate(ids, cache=loaded.cache, max_new_tokens=4, do_sample=False)
    assert all(torch.equal(loaded.hit.kv["full"][name], lent[name]) for name in lent)


async def test_the_cache_may_change_as_soon_as_save_returns(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(2 * kit.chunk)
    cache, _ = run(llama, ids)
    kept = cache.layers[0].keys.clone()
    await save_prefix(llama, store, ids, cache)
    cache.layers[0].keys.zero_()
    loaded = await load_prefix(llama, store, torch.cat([ids, ids], dim=1))
    assert torch.equal(loaded.cache.layers[0].keys, kept)


async def test_a_sliding_cache_that_dropped_its_past_is_refused_with_advice(kit, gemma):
    ids = kit.tokens(4 * kit.chunk)
    cache, _ = run(gemma, ids)
    store = kit.store(gemma)
    with pytest.raises(InvalidValueError, match="activate_past_recording"):
        await save_prefix(gemma, store, ids, cache)
    assert not store.puts
    recorded, _ = run(gemma, ids, recording=True)
    await save_prefix(gemma, store, ids, recorded)
    assert (await load_prefix(gemma, store, torch.cat([ids, ids], dim=1))).num_tokens == 4 * kit.chunk


async def test_tokens_without_kv_are_left_out(kit, llama):
    """The last generated token has none yet; an unfinished chunk waits."""
    store = kit.store(llama)
    ids = kit.tokens(2 * kit.chunk)
    cache, _ = run(llama, ids[:, :-1])
    await save_prefix(llama, store, ids, cache)
    assert store.puts == [(0, kit.chunk, False)]
    assert await save_prefix(llama, store, ids, cache, start=kit.chunk) == ()


async def test_long_caches_are_put_in_pieces(kit, llama, monkeypatch):
    monkeypatch.setattr("kvtier.adapters.transformers.save.PIECE_TOKENS", 40)
    store = kit.store(llama)
    ids = kit.tokens(5 * kit.chunk)
    cache, _ = run(llama, ids)
    await save_prefix(llama, store, ids, cache)
    assert [(start, end) for start, end, _ in store.puts] == [(0, 32), (32, 64), (64, 80)]
    assert len(store.chunks) == 5


async def test_a_cache_of_another_batch_or_a_pruned_one_is_refused(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(2 * kit.chunk)
    cache, _ = run(llama, torch.cat([ids, ids]))
    with pytest.raises(InvalidValueError, match="1 row"):
        await save_prefix(llama, store, ids, cache)
    cache, _ = run(llama, ids)
    cache.layers[1].keys = cache.layers[1].keys[:, :, 5:]
    cache.layers[1].values = cache.layers[1].values[:, :, 5:]
    with pytest.raises(InvalidValueError, match="pruned"):
        await save_prefix(llama, store, ids, cache)
    assert not store.puts


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda config: StaticCache(config=config, max_cache_len=64), "StaticLayer"),
        (lambda config: DynamicCache(), "no layers"),
        (lambda config: QuantizedCache("fp8", config), "Fp8QuantizedLayer"),
    ],
)
async def test_caches_that_hide_their_kv_are_refused_by_name(kit, llama, make, name):
    with pytest.raises(UnsupportedCacheLayerError, match=name):
        await save_prefix(llama, kit.store(llama), kit.tokens(20), make(llama.config))

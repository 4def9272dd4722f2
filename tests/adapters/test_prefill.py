"""Loaded KV stands for computed KV: bit for bit, for full and sliding layers, at every length."""

import threading

import pytest
import torch
from transformers import DynamicCache

from kvtier.adapters.transformers import compute, load_prefix, prefill, restore
from kvtier.errors import InvalidValueError


def split_logits(model, ids, cuts):
    """The reference: the same forward passes, the cache never leaving memory."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for low, high in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
            logits = model(ids[:, low:high], cache=cache, logits_to_keep=1).logits[:, -1]
    return logits


def one_shot(model, ids):
    with torch.no_grad():
        return model(ids).logits[:, -1]


@pytest.mark.parametrize("axes", ["LHTD", "LTHD"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
async def test_warm_logits_are_those_of_the_same_split_bit_for_bit(kit, kind, axes):
    model = getattr(kit, kind)()
    store = kit.store(model, axes)
    ids = kit.tokens(3 * kit.chunk + 5)
    cold = await prefill(model, store, ids, step_tokens=kit.chunk)
    warm = await prefill(model, store, ids, step_tokens=kit.chunk)
    expected = split_logits(model, ids, [kit.chunk, 2 * kit.chunk, 3 * kit.chunk])
    assert (cold.num_loaded, warm.num_loaded) == (0, 3 * kit.chunk)
    assert torch.equal(cold.logits, expected)
    assert torch.equal(warm.logits, expected)
    torch.testing.assert_close(warm.logits, one_shot(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("over", "loaded"), [(-1, 32), (0, 47), (1, 48)])  # chunks of 16
async def test_a_whole_prompt_hit_leaves_one_token_to_compute(kit, llama, over, loaded):
    store = kit.store(llama)
    await prefill(llama, store, kit.tokens(4 * kit.chunk))
    ids = kit.tokens(4 * kit.chunk)[:, : 3 * kit.chunk + over]
    warm = await prefill(llama, store, ids)
    assert warm.num_loaded == loaded
    assert warm.cache.get_seq_length() == ids.shape[1]
    torch.testing.assert_close(warm.logits, one_shot(llama, ids), atol=1e-4, rtol=0)


WINDOW = 24


@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 16, 3 * WINDOW + 1])
async def test_sliding_windows_at_their_edges(kit, length):
    model = kit.gemma(window=WINDOW)
    store = kit.store(model, chunk_tokens=4)
    ids = kit.tokens(length + 7)
    await prefill(model, store, ids, step_tokens=4)
    loaded = await load_prefix(model, store, ids, max_tokens=length)
    assert loaded.num_tokens == loaded.cache.get_seq_length() == length
    with torch.no_grad():
        warm = model(ids[:, loaded.num_tokens :], cache=loaded.cache).logits[:, -1]
    torch.testing.assert_close(warm, one_shot(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [3, 9, 16, 17])
async def test_a_window_smaller_than_the_chunk(kit, window):
    model = kit.gemma(window=window)
    store = kit.store(model)
    ids = kit.tokens(4 * kit.chunk + 3)
    cold = await prefill(model, store, ids, step_tokens=2 * kit.chunk)
    warm = await prefill(model, store, ids, step_tokens=2 * kit.chunk)
    assert warm.num_loaded == 4 * kit.chunk
    assert torch.equal(cold.logits, warm.logits)
    torch.testing.assert_close(warm.logits, one_shot(model, ids), atol=1e-4, rtol=0)


async def test_without_the_cumulative_length_a_sliding_cache_is_wrong(kit, gemma, monkeypatch):
    """The mutation that the tests above must notice: here it is made on purpose."""
    store = kit.store(gemma)
    ids = kit.tokens(5 * kit.chunk + 3)
    await prefill(gemma, store, ids)
    right = restore.fill_layer

    def forgetful(layer, keys, values, num_tokens):
        right(layer, keys, values, num_tokens)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = keys.shape[-2]

    monkeypatch.setattr(restore, "fill_layer", forgetful)
    wrong = await prefill(gemma, store, ids)
    assert wrong.num_loaded == 5 * kit.chunk
    assert (wrong.logits - one_shot(gemma, ids)).abs().max() > 1e-2


async def test_chunks_missing_in_the_middle_shorten_the_hit(kit, gemma):
    store = kit.store(gemma)
    ids = kit.tokens(6 * kit.chunk + 2)
    await prefill(gemma, store, ids)
    whole = dict(store.chunks)
    for gone in whole:
        store.chunks = {key: value for key, value in whole.items() if key != gone}
        warm = await prefill(gemma, store, ids)
        assert warm.num_loaded <= 6 * kit.chunk
        torch.testing.assert_close(warm.logits, one_shot(gemma, ids), atol=1e-4, rtol=0)
        assert warm.num_loaded == 6 * kit.chunk or gone in store.chunks, "what was missed was stored again"


async def test_diverging_prompts_share_their_chunks(kit, llama):
    store = kit.store(llama)
    first = kit.tokens(4 * kit.chunk)
    second = torch.cat([first[:, : 2 * kit.chunk], kit.tokens(2 * kit.chunk, seed=9)], dim=1)
    await prefill(llama, store, first)
    assert len(store.chunks) == 4
    warm = await prefill(llama, store, second)
    assert warm.num_loaded == 2 * kit.chunk
    assert len(store.chunks) == 6


async def test_salt_and_lora_keep_prompts_apart(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(2 * kit.chunk + 1)
    await prefill(llama, store, ids)
    for identity in ({"salt": "tenant"}, {"lora": "ab" * 16}):
        assert (await load_prefix(llama, store, ids, **identity)).num_tokens == 0
    assert (await load_prefix(llama, store, ids)).num_tokens == 2 * kit.chunk


async def test_rows_of_a_batch_are_stored_one_by_one_and_loaded_to_their_common_length(kit, gemma):
    store = kit.store(gemma)
    long, short = kit.tokens(5 * kit.chunk + 2), kit.tokens(5 * kit.chunk + 2, seed=4)
    await prefill(gemma, store, long)
    await prefill(gemma, store, short[:, : 3 * kit.chunk + 1])
    both = torch.cat([long, short])
    warm = await prefill(gemma, store, both)
    assert warm.num_loaded == 3 * kit.chunk
    torch.testing.assert_close(warm.logits, one_shot(gemma, both), atol=1e-4, rtol=0)
    assert (await prefill(gemma, store, both)).num_loaded == 5 * kit.chunk


async def test_joining_rows_leaves_the_loop_alone(kit, llama, monkeypatch):
    store = kit.store(llama)
    both = torch.cat([kit.tokens(2 * kit.chunk), kit.tokens(2 * kit.chunk, seed=4)])
    await prefill(llama, store, both)
    where = []
    build = restore.build_cache
    monkeypatch.setattr(
        restore, "build_cache", lambda *given: (where.append(threading.current_thread()), build(*given))[1]
    )
    await load_prefix(llama, store, both)
    await load_prefix(llama, store, both[:1])
    assert [thread is threading.main_thread() for thread in where] == [False, True]


async def test_a_row_with_nothing_stored_spares_the_others_their_reads(kit, llama):
    store = kit.store(llama)
    await prefill(llama, store, kit.tokens(3 * kit.chunk))
    reads = []
    store.get = lambda *args, **options: reads.append(args)
    loaded = await load_prefix(llama, store, torch.cat([kit.tokens(3 * kit.chunk), kit.tokens(3 * kit.chunk, seed=4)]))
    assert (loaded.num_tokens, loaded.hits, reads) == (0, (None, None), [])


async def test_a_chunk_that_goes_while_rows_are_read_shortens_all_of_them(kit, gemma):
    store = kit.store(gemma)
    long, short = kit.tokens(5 * kit.chunk + 2), kit.tokens(5 * kit.chunk + 2, seed=4)
    await prefill(gemma, store, long)
    await prefill(gemma, store, short[:, : 3 * kit.chunk + 1])

    async def exists(prefix):
        return 5 * kit.chunk  # so it was, a moment ago

    store.exists = exists
    both = torch.cat([long, short])
    loaded = await load_prefix(gemma, store, both)
    assert [hit.num_tokens for hit in loaded.hits] == [3 * kit.chunk, 3 * kit.chunk]
    with torch.no_grad():
        logits = gemma(both[:, loaded.num_tokens :], cache=loaded.cache).logits[:, -1]
    torch.testing.assert_close(logits, one_shot(gemma, both), atol=1e-4, rtol=0)


async def test_padding_is_refused(kit, llama):
    ids = kit.tokens(kit.chunk)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(InvalidValueError, match="padding"):
        await prefill(llama, kit.store(llama), ids, attention_mask=mask)
    await prefill(llama, kit.store(llama), ids, attention_mask=torch.ones_like(ids))


async def test_what_is_computed_on_a_lossy_hit_is_stored_as_lossy(kit, llama):
    store = kit.store(llama)
    await prefill(llama, store, kit.tokens(2 * kit.chunk + 1))
    assert [lossy for _, _, lossy in store.puts] == [False]
    store.lossy_hits = True
    warm = await prefill(llama, store, kit.tokens(5 * kit.chunk)[:, : 5 * kit.chunk])
    assert warm.lossy == (warm.num_loaded > 0)
    assert all(lossy for _, _, lossy in store.puts[1:]) == warm.lossy


@pytest.mark.parametrize(
    "ids", [[], [[]], torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(4), torch.ones(4, dtype=torch.bool)]
)
async def test_ids_that_are_no_token_rows_are_refused(kit, llama, ids):
    with pytest.raises(InvalidValueError, match="input_ids"):
        await prefill(llama, kit.store(llama), ids)


async def test_ids_may_be_a_list_or_one_row(kit, llama):
    ids = kit.tokens(2 * kit.chunk + 1)
    store = kit.store(llama)
    as_list = await prefill(llama, store, ids[0].tolist())
    as_row = await prefill(llama, store, ids[0])
    assert as_row.num_loaded == 2 * kit.chunk
    torch.testing.assert_close(as_list.logits, as_row.logits, atol=1e-4, rtol=0)


async def test_a_prefilled_cache_is_as_small_as_any_other(kit, gemma):
    """The past is recorded while it has to be stored, and no longer."""
    prefilled = await prefill(gemma, kit.store(gemma), kit.tokens(4 * kit.chunk))
    window = gemma.config.sliding_window
    sliding = [layer for layer in prefilled.cache.layers if hasattr(layer, "sliding_window")]
    assert {layer.keys.shape[-2] for layer in sliding} == {window - 1}
    with torch.no_grad():
        gemma(kit.tokens(40), cache=prefilled.cache)
    assert {layer.keys.shape[-2] for layer in sliding} == {window - 1}


def test_steps_end_at_the_same_positions_wherever_they_begin():
    assert list(compute.steps(0, 70, 32)) == [(0, 32), (32, 64), (64, 70)]
    assert list(compute.steps(16, 70, 32)) == [(16, 32), (32, 64), (64, 70)]
    assert list(compute.steps(47, 64, 32)) == [(47, 64)]
    assert list(compute.steps(64, 64, 32)) == []

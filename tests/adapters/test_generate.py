"""`cached_generate`: the tokens of `model.generate`, whatever the store holds."""

import asyncio
import threading

import pytest
import torch

from kvtier.adapters.transformers import cached_generate
from kvtier.errors import InvalidValueError, UnsupportedModelError

NEW = 12


def plain(model, ids, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **{"do_sample": False, **options}
    )


async def cached(model, store, ids, **options):
    return await cached_generate(model, store, ids, max_new_tokens=NEW, **{"do_sample": False, **options})


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_tokens_are_those_without_a_store_cold_and_warm(kit, kind, over):
    model = getattr(kit, kind)()
    store = kit.store(model)
    ids = kit.tokens(4 * kit.chunk + over)
    expected = plain(model, ids)
    cold = await cached(model, store, ids)
    stored = len(store.puts)
    warm = await cached(model, store, ids)
    assert all(start >= warm.num_loaded for start, _, _ in store.puts[stored:]), "nothing is stored twice"
    assert torch.equal(cold.sequences, expected)
    assert torch.equal(warm.sequences, expected)
    assert (cold.num_loaded, cold.tiers) == (0, {})
    assert warm.num_loaded >= 3 * kit.chunk
    assert warm.tiers == {"fake": 1}


@pytest.mark.parametrize("kind", ["llama", "gemma"])
async def test_the_next_turn_finds_the_answer_too(kit, kind):
    model = getattr(kit, kind)()
    store = kit.store(model)
    first = await cached(model, store, kit.tokens(2 * kit.chunk - 3))
    turn = torch.cat([first.sequences, kit.tokens(2 * kit.chunk + 5, seed=3)], dim=1)
    second = await cached(model, store, turn)
    assert second.num_loaded == (2 * kit.chunk - 3 + NEW - 1) // kit.chunk * kit.chunk == 2 * kit.chunk
    assert torch.equal(second.sequences, plain(model, turn))
    third = torch.cat([second.sequences, kit.tokens(5, seed=4)], dim=1)
    result = await cached(model, store, third)
    assert result.num_loaded == (second.sequences.shape[1] - 1) // kit.chunk * kit.chunk
    assert torch.equal(result.sequences, plain(model, third))


async def test_answers_on_top_of_a_lossy_hit_are_stored_as_lossy(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(2 * kit.chunk + 1)
    assert not (await cached(llama, store, ids)).lossy
    store.lossy_hits = True
    longer = torch.cat([ids, kit.tokens(kit.chunk - 6, seed=2)], dim=1)
    stored = len(store.puts)
    assert (await cached(llama, store, longer)).lossy
    assert [lossy for _, _, lossy in store.puts[stored:]] == [True]


async def test_a_batch_of_equally_long_rows(kit, gemma):
    store = kit.store(gemma)
    both = torch.cat([kit.tokens(3 * kit.chunk), kit.tokens(3 * kit.chunk, seed=8)])
    expected = plain(gemma, both)
    assert torch.equal((await cached(gemma, store, both)).sequences, expected)
    warm = await cached(gemma, store, both)
    assert warm.num_loaded == 3 * kit.chunk - 1
    assert torch.equal(warm.sequences, expected)


@pytest.mark.parametrize("length", [1, 5])
async def test_a_prompt_shorter_than_a_chunk(kit, gemma, length):
    store = kit.store(gemma)
    ids = kit.tokens(length)
    out = await cached(gemma, store, ids)
    assert torch.equal(out.sequences, plain(gemma, ids))
    assert (out.num_loaded, len(store.chunks)) == (0, 2 * ((length + NEW - 1) // kit.chunk))


async def test_generate_gets_the_callers_options(kit, llama):
    store = kit.store(llama)
    ids = kit.tokens(2 * kit.chunk)
    seen = []

    def stop_at_once(input_ids, scores, **unused):
        seen.append(input_ids.shape[1])
        return torch.ones(input_ids.shape[0], dtype=torch.bool)

    out = await cached(
        llama, store, ids, stopping_criteria=[stop_at_once], return_dict_in_generate=True, output_scores=True
    )
    assert out.sequences.shape[1] == ids.shape[1] + 1
    assert len(out.output.scores) == 1
    assert seen == [ids.shape[1] + 1]


async def test_a_generation_config_that_names_a_cache_of_its_own_is_overruled(kit, llama):
    ids = kit.tokens(2 * kit.chunk)
    expected = plain(llama, ids)
    llama.generation_config.cache_implementation = "static"
    assert torch.equal((await cached(llama, kit.store(llama), ids)).sequences, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_type_ids", torch.zeros(1, 16)),
        ("pixel_values", torch.zeros(1, 3, 8, 8)),
        ("image_sizes", [(8, 8)]),
        ("inputs_embeds", torch.zeros(1, 16, 32)),
        ("position_ids", torch.arange(16)[None]),
        ("past_key_values", object()),
        ("cache", object()),
        ("assistant_model", object()),
    ],
)
async def test_arguments_on_which_kv_would_depend_are_refused_by_name(kit, llama, name, value):
    store = kit.store(llama)
    with pytest.raises(UnsupportedModelError, match=name):
        await cached(llama, store, kit.tokens(kit.chunk), **{name: value})
    assert not store.puts
    await cached(llama, store, kit.tokens(kit.chunk), **{name: None})


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"use_cache": False}]
)
async def test_options_that_need_another_cache_are_refused(kit, llama, options):
    with pytest.raises(InvalidValueError, match=next(iter(options))):
        await cached(llama, kit.store(llama), kit.tokens(kit.chunk), **options)


async def test_padding_is_refused(kit, llama):
    mask = torch.ones(1, kit.chunk, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(InvalidValueError, match="one by one"):
        await cached(llama, kit.store(llama), kit.tokens(kit.chunk), attention_mask=mask)
    with pytest.raises(InvalidValueError, match="attention_mask has shape"):
        await cached(llama, kit.store(llama), kit.tokens(kit.chunk), attention_mask=mask[:, 1:])


async def test_the_loop_goes_on_while_the_model_runs(kit, llama):
    release, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(input_ids, scores, **unused):
        loop.call_soon_threadsafe(entered.set)
        release.wait(30)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    task = asyncio.create_task(cached(llama, kit.store(llama), kit.tokens(kit.chunk), stopping_criteria=[hold]))
    await entered.wait()  # the loop ran on while the model stood still
    release.set()
    assert (await task).sequences.shape[1] == kit.chunk + NEW


async def test_cancelling_ends_the_generation_at_the_next_token(kit, llama):
    store = kit.store(llama)
    release, entered = threading.Event(), asyncio.Event()
    loop, calls = asyncio.get_running_loop(), []

    def hold(input_ids, scores, **unused):
        calls.append(input_ids.shape[1])
        loop.call_soon_threadsafe(entered.set)
        release.wait(30)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids = kit.tokens(2 * kit.chunk + 1)
    task = asyncio.create_task(cached(llama, store, ids, stopping_criteria=[hold]))
    await entered.wait()
    task.cancel()
    for _ in range(3):  # nothing ends while the model runs on memory of this call, also when told again
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == [ids.shape[1] + 1], "it would have gone on for twelve tokens"
    assert store.puts == [(0, 2 * kit.chunk, False)], "the prompt's chunks were stored before, and stay"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-model")]


async def test_an_exception_of_generate_comes_out_as_it_is(kit, llama):
    def fail(input_ids, scores, **unused):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await cached(llama, kit.store(llama), kit.tokens(kit.chunk), stopping_criteria=[fail])

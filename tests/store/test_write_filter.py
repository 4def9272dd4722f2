"""A tier that takes only what was used twice: the rest stays above, is counted, and a flush saves it all the same."""

import pytest

from kvtier.errors import ConfigError

PROMPT = list(range(16))


async def put(kit, store, tokens=PROMPT):
    await store.put(tokens, kit.kv(tokens))
    for writer in store._engine.writers.values():
        await writer.drain(timeout=30.0)


def medium(store):
    return store.stats().tiers["medium"]


async def test_a_value_is_written_when_it_is_used_again(kit):
    async with kit.open(kit.memory(), kit.medium(admit="second-touch")) as store:
        await put(kit, store)
        assert (medium(store).written, medium(store).held_back) == (0, 4)
        hit = await store.get(PROMPT[:8])
        kit.assert_kv(hit, PROMPT[:8])
        await store._engine.writers["medium"].drain(timeout=30.0)
        assert medium(store).written == 2
        await store.get(PROMPT[:8])
        await put(kit, store)  # a put is a use, too
        assert medium(store).written == 4
        kit.assert_books_balance(store)


async def test_a_flush_saves_what_the_filter_held_back(kit):
    async with kit.open(kit.memory(), kit.medium(admit="second-touch")) as store:
        await put(kit, store)
        told = await store.flush()
        assert told.complete
        assert medium(store).written == 4
    async with kit.open(kit.memory(), kit.medium(admit="second-touch")) as store:
        result = await store.put(PROMPT, kit.kv(PROMPT), wait="durable")
        assert result.count("stored") == 4
        assert medium(store).written == 4


async def test_what_was_used_once_is_not_demoted(kit):
    top = kit.memory(capacity="64KiB", promote="never")
    async with kit.open(top, kit.medium(write="back", admit="second-touch")) as store:
        await put(kit, store, [1] * 16)
        await store.get([1] * 16)
        for seed in range(2, 12):
            await put(kit, store, [seed] * 16)
        assert medium(store).demoted == 4
        assert medium(store).held_back > 20
        assert await store.exists([1] * 16) == 16
        kit.assert_books_balance(store)


def test_the_first_tier_has_nothing_above_it(kit):
    with pytest.raises(ConfigError, match="no tier above"):
        kit.open(kit.medium(admit="second-touch"))

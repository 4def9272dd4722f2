"""What callers tell of the future: sessions that end, pins within a fraction, namespaces within their shares."""

import pytest

import kvtier
from kvtier.errors import ConfigError

HINTS = {name: kvtier.Hint(session=name) for name in ("one", "two", "three")}


def prompt(seed, chunks, system=1):
    """Tokens of a prompt that begins with the chunks all prompts share."""
    return [7] * (4 * system) + [seed] * (4 * (chunks - system))


@pytest.fixture
def tier(kit):
    """A memory tier for eight chunks."""
    return {"backend": "pinned-cpu", "capacity": 8 * chunk_bytes(kit), "policy": "lfu"}


def chunk_bytes(kit):
    from kvtier.store.faces import largest_object

    return -(-largest_object(kit.layout, kit.chunk_tokens) // 4096) * 4096


async def use(kit, store, tokens, hint):
    hit = await store.get(tokens, hint=hint)
    start = hit.num_tokens if hit else 0
    kv = kit.kv(tokens)
    await store.put(tokens, {name: tensor[:, start:] for name, tensor in kv.items()}, start=start, hint=hint)
    return start


async def filled(kit, store):
    """Two sessions of four chunks, that share one: seven chunks, and the first session was used the most."""
    one, two = prompt(1, 4), prompt(2, 4)
    await use(kit, store, one, HINTS["one"])
    for _ in range(3):
        await store.touch(one, hint=HINTS["one"])
    await use(kit, store, two, HINTS["two"])
    return one, two


async def test_what_an_ended_session_leaves_goes_first(kit, tier):
    async with kit.open(tier) as store:
        one, two = await filled(kit, store)
        assert await store.end_session("one") == 3  # the shared chunk stays with session two
        await use(kit, store, prompt(3, 4, system=0), HINTS["three"])
        assert await store.exists(two) == len(two)
        assert await store.exists(one) == 4
        kit.assert_books_balance(store)


async def test_without_that_the_policy_decides(kit, tier):
    async with kit.open(tier) as store:
        one, two = await filled(kit, store)
        await use(kit, store, prompt(3, 4, system=0), HINTS["three"])
        assert await store.exists(one) == len(one)
        assert await store.exists(two) == 4


@pytest.mark.parametrize("how", ["get", "touch"])
async def test_a_use_takes_the_end_back(kit, tier, how):
    async with kit.open(tier) as store:
        one, two = await filled(kit, store)
        await store.end_session("one")
        await (store.get(one) if how == "get" else store.touch(one))
        await use(kit, store, prompt(3, 4, system=0), HINTS["three"])
        assert await store.exists(one) == len(one)
        assert await store.exists(two) == 4


async def test_sessions_nobody_knows_end_without_a_word(kit, tier):
    async with kit.open(tier) as store:
        assert await store.end_session("nobody") == 0


async def test_an_ended_session_is_not_written_down(kit, tier):
    disk = kit.disk(write="back")
    async with kit.open(tier, disk) as store:
        one, _ = await filled(kit, store)
        await store.end_session("one")
        await use(kit, store, prompt(3, 4, system=0), HINTS["three"])
        assert store.stats().tiers["local-disk"].counters["written"] == 0
        assert await store.exists(one) == 4


async def test_pins_stay_within_their_fraction(kit, tier):
    async with kit.open({**tier, "pin_fraction": 0.5}) as store:
        tokens = prompt(1, 6)
        await use(kit, store, tokens, None)
        await store.pin(tokens, ttl_seconds=60)
        assert store.stats().tiers["pinned-cpu"].pinned == 4
        await store.unpin(tokens)
        assert store.stats().tiers["pinned-cpu"].pinned == 0


async def test_a_namespace_over_its_share_gives_way_first(kit, tier):
    other = kvtier.Namespace(model="org/other", revision="1")
    digest = other.fingerprint(layout=kit.layout.describe(), chunk_tokens=kit.chunk_tokens).text16
    async with kit.open(tier, shares={digest: 0.25}) as store:
        face = store.with_namespace(other)
        mine, others = prompt(1, 3), prompt(2, 4)
        await use(kit, store, mine, None)
        await use(kit, face, others, None)
        for _ in range(3):
            await face.touch(others)
        await use(kit, store, prompt(3, 3, system=0), None)
        assert await store.exists(mine) == len(mine)
        assert await face.exists(others) < len(others)


def test_shares_name_namespaces():
    with pytest.raises(ConfigError, match="shares"):
        kvtier.StoreConfig(tiers=[{"backend": "pinned-cpu", "capacity": "1MiB"}], shares={"model": 0.5})

"""Load or recompute, decided by what the tiers' reads took: the part that pays is loaded, a slow tier is left alone."""

import asyncio
import json

import pytest

import kvtier
from kvtier.errors import ConfigError, InvalidValueError
from kvtier.planner import Link, Prefill
from kvtier.store.requests import GetRequest
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.faults import SlowBackend
from kvtier.testing.memory import MemoryBackend
from kvtier.testing.servers.redis_tiers import new_prefix

CHUNKS = 6
PROMPT = list(range(4 * CHUNKS))
QUICK = Prefill(linear_seconds=1e-9)  # as good as no time at all
LONG = Prefill(linear_seconds=100.0)


async def filled(kit, store):
    await store.put(PROMPT, kit.kv(PROMPT), wait=None)
    assert (await store.flush()).complete


async def settled(store):
    """Wait until measuring in the background is over."""
    while store._engine.paying._probing:
        await asyncio.sleep(0.001)


def measured(store, name="medium"):
    return store._engine.tier(name).link.link


async def test_without_a_model_of_the_prefill_nothing_can_be_planned(kit):
    async with kit.open(kit.memory()) as store:
        await filled(kit, store)
        with pytest.raises(InvalidValueError, match=r"Prefill\.fit"):
            await store.plan(PROMPT)
        with pytest.raises(InvalidValueError, match=r"\[planner\]"):
            await store.get(PROMPT, min_benefit_seconds=0.0)
        store.prefill = LONG
        for wrong in (-1.0, float("nan"), float("inf"), True, "1"):
            with pytest.raises(InvalidValueError, match="min_benefit_seconds"):
                await store.get(PROMPT, min_benefit_seconds=wrong)


async def test_a_get_of_a_batch_has_a_bound_of_its_own(kit):
    async with kit.open(kit.memory()) as store:
        await filled(kit, store)
        store.prefill = LONG
        bounds = [None, 1.0, 1e6]
        found = await store.get_many([GetRequest(PROMPT, min_benefit_seconds=bound) for bound in bounds])
        assert [hit and hit.num_tokens for hit in found] == [len(PROMPT), len(PROMPT), None]


async def test_memory_is_loaded_when_that_pays(kit):
    async with kit.open(kit.memory()) as store:
        await filled(kit, store)
        store.prefill = LONG
        plan = await store.plan(PROMPT)
        assert (plan.choice, plan.load_tokens, plan.compute_tokens) == ("load", len(PROMPT), 0)
        assert plan.recompute_seconds == pytest.approx(100.0 * len(PROMPT))
        hit = await store.get(PROMPT, min_benefit_seconds=1.0)
        assert hit.num_tokens == len(PROMPT)
        assert await store.get(PROMPT, min_benefit_seconds=1e6) is None
        assert (await store.plan(PROMPT, start=8, max_tokens=16)).load_tokens == 8
        assert (await store.plan([1, 2, 3] * 9)).load_tokens == 0


async def test_what_the_model_computes_sooner_is_not_loaded(kit):
    async with kit.open(kit.memory()) as store:
        await filled(kit, store)
        store.prefill = QUICK
        assert (await store.plan(PROMPT)).choice == "recompute"
        assert await store.get(PROMPT, min_benefit_seconds=0.0) is None
        assert (await store.get(PROMPT)).num_tokens == len(PROMPT)  # who does not ask is not refused
        kit.assert_books_balance(store)


async def test_a_tier_of_unknown_speed_is_measured_first_in_the_background(kit):
    tier = kit.medium()
    async with kit.open(tier) as store:
        await filled(kit, store)
        store.prefill = LONG
        assert measured(store) is None
        assert await store.get(PROMPT, min_benefit_seconds=0.0) is None
        await settled(store)
        assert measured(store) is not None
        assert (await store.get(PROMPT, min_benefit_seconds=0.0)).num_tokens == len(PROMPT)
        kit.assert_books_balance(store)


async def test_reads_of_any_call_are_measured_and_a_slow_tier_is_left_alone(kit):
    backend = SlowBackend(MemoryBackend(), seconds={"read": 0.03})
    async with kit.open(kit.medium(backend)) as store:
        await filled(kit, store)
        for chunks in (1, 6, 2, 5):
            await store.get(PROMPT[: 4 * chunks])
        told = measured(store)
        assert 0.01 < told.latency_seconds < 10
        store.prefill = Prefill(linear_seconds=0.03 / len(PROMPT) / 10)
        assert (await store.plan(PROMPT)).choice == "recompute"
        before = store.stats().tiers["medium"].lookups
        assert await store.get(PROMPT, min_benefit_seconds=0.0) is None
        assert store.stats().tiers["medium"].lookups == before
        store.prefill = LONG
        assert (await store.plan(PROMPT)).choice == "load"


async def test_a_tier_that_was_slow_gets_another_chance(kit, monkeypatch):
    backend = SlowBackend(MemoryBackend(), seconds={"read": 0.05})
    async with kit.open(kit.medium(backend)) as store:
        await filled(kit, store)
        await store.get(PROMPT)
        store.prefill = Prefill(linear_seconds=0.03 / len(PROMPT))
        assert await store.get(PROMPT, min_benefit_seconds=0.0) is None
        backend.seconds = 0.0
        monkeypatch.setattr("kvtier.store.paying.STALE_SECONDS", 0.0)
        for _ in range(20):
            if await store.get(PROMPT, min_benefit_seconds=0.0) is not None:
                break
            await settled(store)
        else:
            pytest.fail("the tier was never asked again")


async def test_the_leading_part_that_pays_is_loaded(kit):
    slow = SlowBackend(MemoryBackend(), seconds={"read": 0.2})
    tiers = [kit.memory(promote="never"), kit.medium(slow)]
    async with kit.open(*tiers) as store:
        await filled(kit, store)
        await store.get(PROMPT)
        store._engine.tier("medium").link.seed(Link(latency_seconds=0.2, bytes_per_second=1e6))
        top = store._engine.top
        for piece, entry in enumerate(list(top.ledger.index.entries.values())):
            if piece >= 2:
                top.drop(entry, "evicted")
        store.prefill = Prefill(linear_seconds=0.01 / 4)  # 10 ms a chunk: sooner than the medium's, not than memory's
        plan = await store.plan(PROMPT)
        assert (plan.choice, plan.load_tokens, plan.compute_tokens) == ("load", 8, 16)
        assert (await store.get(PROMPT, min_benefit_seconds=0.0)).num_tokens == 8


async def test_both_ends_at_once(kit):
    async with kit.open(kit.medium()) as store:
        await filled(kit, store)
        size = next(iter(store._engine.tier("medium").ledger.index.entries.values())).size
        link = Link(latency_seconds=0.0, bytes_per_second=size / 1.0)  # a second for a chunk, as long as computing it
        for _ in range(30):
            store._engine.tier("medium").link.seed(link)
        store.prefill = Prefill(linear_seconds=1.0 / 4)
        plan = await store.plan(PROMPT, split=True)
        assert (plan.choice, plan.compute_tokens, plan.load_tokens) == ("both", 12, 12)
        assert plan.seconds == pytest.approx(3.0, rel=0.01)
        back = await store.get(PROMPT, start=plan.compute_tokens)
        assert (back.start, back.num_tokens) == (12, 24)


async def test_a_link_that_slows_down_meanwhile_costs_no_more_than_computing(kit):
    backend = SlowBackend(MemoryBackend(), seconds=0.0)
    async with kit.open(kit.medium(backend), deadline_seconds=60.0) as store:
        await filled(kit, store)
        await store.get(PROMPT)
        store.prefill = Prefill(linear_seconds=0.5 / len(PROMPT))
        backend.seconds = {"read": 30.0}
        async with asyncio.timeout(20):
            assert await store.get(PROMPT, min_benefit_seconds=0.0) is None


@pytest.mark.redis
async def test_a_real_server_far_away(kit, redis_server):
    with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        tier = {"backend": "redis", "url": url, "prefix": new_prefix(), "capacity": "64MiB"}
        async with kit.open(tier) as store:
            await filled(kit, store)
            store.prefill = Prefill(linear_seconds=0.05 / len(PROMPT))
            await store.get(PROMPT)
            proxy.replies = Fault(delay_seconds=0.2)
            for _ in range(3):
                await store.get(PROMPT)
            assert (await store.plan(PROMPT)).choice == "recompute"
            assert await store.get(PROMPT, min_benefit_seconds=0.0) is None
            store.prefill = LONG
            assert (await store.plan(PROMPT)).choice == "load"


def opened(kit, **options):
    return kvtier.open(kit.config(kit.medium(), **options), namespace=kit.namespace, layout=kit.layout)


async def test_what_was_measured_before_is_read_from_the_config(kit, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(
        json.dumps(
            {
                "prefill": {"linear_seconds": 1e-3, "quadratic_seconds": 0.0},
                "links": {"medium": {"latency_seconds": 0.5, "bytes_per_second": 1e6}},
            }
        )
    )
    async with opened(kit, planner={"calibration": str(path)}) as store:
        assert store.prefill == Prefill(linear_seconds=1e-3)
        assert measured(store).latency_seconds == pytest.approx(0.5)
        assert measured(store).bytes_per_second == pytest.approx(1e6)
    async with opened(kit, planner={"measured": [[100, 0.1], [200, 0.2]]}) as store:
        assert store.prefill.seconds(1000) == pytest.approx(1.0)
    async with opened(kit, planner={"tokens_per_second": 500}) as store:
        assert store.prefill.seconds(1000) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("planner", "text"),
    [
        ({"measured": [[100, 0.1]]}, "two lengths"),
        ({"calibration": "nowhere.json"}, "kvtier doctor"),
        ({"tokens_per_second": 0}, "tokens_per_second"),
    ],
)
def test_a_planner_that_cannot_work_is_refused(kit, planner, text):
    with pytest.raises(ConfigError, match=text):
        opened(kit, planner=planner)


def test_names():
    assert kvtier.Prefill is Prefill

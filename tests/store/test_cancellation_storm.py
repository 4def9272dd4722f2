"""Ten thousand cancelled gets into buffers that are refilled at once (K8); the control is in `test_cancellation.py`."""

import asyncio
import random

import torch

from kvtier.concurrency import Workers

AT_ONCE = 250
PAINT = 0x5A
PROMPTS = [[number] * 16 for number in range(8)]


class ForAllBytes(Workers):
    """Threads that copy however few bytes there are, so that most gets can be cancelled on the way."""

    loop_bytes = 0


async def cancelled_get(store, tokens, out, drawn):
    """Begin a get, cancel it within its first turns, and refill the buffer the moment the call has ended."""
    call = asyncio.ensure_future(store.get(tokens, out=out))
    for _ in range(drawn.randrange(12)):
        await asyncio.sleep(0)
    call.cancel()
    ended = await asyncio.gather(call, return_exceptions=True)
    for tensor in out.values():
        tensor.view(torch.uint8).fill_(PAINT)
    return isinstance(ended[0], asyncio.CancelledError)


async def storm(kit, store, gets):
    """Return how many of the calls were cancelled, and how many buffers were touched after their call."""
    drawn = random.Random(3)
    cancelled = damaged = 0
    for _ in range(gets // AT_ONCE):
        prompts = [drawn.choice(PROMPTS) for _ in range(AT_ONCE)]
        outs = [{name: torch.empty_like(tensor) for name, tensor in kit.kv(tokens).items()} for tokens in prompts]
        calls = [cancelled_get(store, tokens, out, drawn) for tokens, out in zip(prompts, outs, strict=True)]
        cancelled += sum(await asyncio.gather(*calls))
        await asyncio.sleep(0.01)  # a late writer would come now
        damaged += sum(
            not all(bool((tensor.view(torch.uint8) == PAINT).all()) for tensor in out.values()) for out in outs
        )
    return cancelled, damaged


async def test_ten_thousand_cancelled_gets_damage_nothing_and_leave_nothing(kit):
    async with kit.open(kit.memory(), kit.medium(), make_workers=ForAllBytes) as store:
        for tokens in PROMPTS:
            await store.put(tokens, kit.kv(tokens))
        await store.flush()
        tasks = len(asyncio.all_tasks())
        used = store.stats().memory.arena_used
        cancelled, damaged = await storm(kit, store, 10_000)
        assert cancelled > 3_000
        assert damaged == 0
        await kit.until(lambda: store.stats().reads_under_way == 0)
        assert len(asyncio.all_tasks()) <= tasks
        assert store.stats().memory.arena_used == used
        for tokens in PROMPTS:
            assert (await store.get(tokens)).num_tokens == len(tokens)

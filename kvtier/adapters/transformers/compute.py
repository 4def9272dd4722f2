"""Load what is stored, compute the rest chunk by chunk, store what is new."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtier.adapters.transformers.plan import cache_argument
from kvtier.adapters.transformers.request import Identity, Request, TokenIds, check_unpadded, make_request
from kvtier.adapters.transformers.restore import load
from kvtier.adapters.transformers.save import save
from kvtier.adapters.transformers.threads import ModelThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import DynamicCache, PreTrainedModel

    from kvtier.keys import Hint
    from kvtier.store.kv import KVStore

STEP_TOKENS = 256  # computed at a time, rounded up to whole chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A cache that holds the whole prompt; `logits` ([batch, vocabulary]) are of its last token.

    The first `num_loaded` tokens of every row came from the store; `tiers` counts the chunks that each tier gave. Pass
    `lossy` on when saving what is computed later. The logits have the dtype that the model computes them in.
    """

    cache: DynamicCache
    logits: torch.Tensor
    num_loaded: int
    tiers: Mapping[str, int]
    lossy: bool


async def prefill(
    model: PreTrainedModel,
    store: KVStore,
    input_ids: TokenIds,
    *,
    attention_mask: torch.Tensor | None = None,
    step_tokens: int = STEP_TOKENS,
    salt: str | bytes | None = None,
    lora: str | None = None,
    hint: Hint | None = None,
) -> Prefilled:
    """Compute the KV of a whole prompt, loading what is stored and storing every new whole chunk as soon as it exists.

    Forward passes run in a thread, `step_tokens` (rounded up to whole chunks) at a time, ending at multiples of it:
    so sliding windows still hold what is stored, and a chunk's KV does not depend on which prompt computed it.
    When cancelled, it returns after the current forward pass; what was stored stays stored.

    Raises:
        InvalidValueError: ids that cannot be used, padding.
        UnsupportedModelError, LayoutMismatchError: the model cannot be stored, or not in this store.
    """
    request = make_request(model, store, input_ids, Identity(salt=salt, lora=lora, hint=hint))
    check_unpadded(attention_mask, request)
    loaded = await load(request)
    cache, num_loaded, tiers, lossy = loaded.cache, loaded.num_tokens, loaded.tiers, loaded.lossy
    del loaded  # its hits hold the memory that the first forward pass copies out of
    async with ModelThread() as thread:
        logits = await compute(
            request,
            cache,
            begin=num_loaded,
            end=request.num_tokens,
            lossy=lossy,
            thread=thread,
            step_tokens=step_tokens,
        )
    stop_recording(cache)
    assert logits is not None  # noqa: S101  # `load` leaves at least one token to compute
    return Prefilled(cache=cache, logits=logits, num_loaded=num_loaded, tiers=tiers, lossy=lossy)


async def compute(
    request: Request,
    cache: DynamicCache,
    *,
    begin: int,
    end: int,
    lossy: bool,
    thread: ModelThread,
    step_tokens: int = STEP_TOKENS,
) -> torch.Tensor | None:
    """Bring a cache of `begin` tokens to `end` and store its new chunks; return the last token's logits, if any ran.

    The cache is left recording its past: sliding layers keep what is computed until they are cropped.
    """
    logits = None
    cache.activate_past_recording()
    step = max(request.chunk_tokens, request.chunks_after(step_tokens))
    for low, high in steps(begin, end, step):
        logits = await thread.run(forward, request, cache, low, high)
        await save(request, cache, start=low, lossy=lossy, thread=thread)
        cache.crop(0)  # lets go of what the windows no longer see; only now, since it had to be stored first
    return logits


def steps(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of tokens to compute: from `begin` to `end`, cut at multiples of `step`."""
    low = begin
    while low < end:
        high = min((low // step + 1) * step, end)
        yield low, high
        low = high


def forward(request: Request, cache: DynamicCache, low: int, high: int) -> torch.Tensor:
    """Run tokens [low, high) on top of the cache; return the logits of the last one, [batch, vocabulary]."""
    model = request.model
    options: dict[str, object] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    with torch.no_grad():
        output = model(request.ids[:, low:high].to(model.device), **options)
    logits: torch.Tensor = output.logits[:, -1].clone()
    return logits


def stop_recording(cache: DynamicCache) -> None:
    """Let sliding layers forget again what their window no longer sees."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False

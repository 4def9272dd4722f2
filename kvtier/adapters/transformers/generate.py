"""One call for people: `model.generate`, with the prompt's stored prefix loaded and everything new stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import StoppingCriteriaList

from kvtier.adapters.transformers.compute import compute
from kvtier.adapters.transformers.plan import cache_argument
from kvtier.adapters.transformers.request import Identity, Request, TokenIds, check_unpadded, make_request
from kvtier.adapters.transformers.restore import load
from kvtier.adapters.transformers.save import save
from kvtier.adapters.transformers.threads import ModelThread
from kvtier.errors import InvalidValueError, UnsupportedModelError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from transformers import DynamicCache, PreTrainedModel
    from transformers.utils import ModelOutput

    from kvtier.keys import Hint
    from kvtier.store.kv import KVStore

# Arguments of `generate` that make KV depend on more than the tokens before it, or that bring a cache of their own.
REFUSED = {
    "cache": "the adapter makes the cache itself",
    "past_key_values": "the adapter makes the cache itself",
    "inputs_embeds": "a prefix is found by its tokens, not by embeddings",
    "position_ids": "stored KV begins at position 0",
    "token_type_ids": "KV would depend on them as well as on the tokens",
    "assistant_model": "assisted generation rolls the cache back",
    "prompt_lookup_num_tokens": "assisted generation rolls the cache back",
    "custom_generate": "its use of the cache is not known",
    "negative_prompt_ids": "one cache would hold two prompts",
}
REFUSED_BEGINNINGS = ("pixel_values", "image", "video", "audio", "input_features", "mm_token_type_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Token rows ([batch, prompt + new], int64), and `output`, all that `model.generate` returned.

    The first `num_loaded` tokens of every row came from the store; `tiers` counts the chunks that each tier gave, and
    `lossy` tells whether any of them went through a lossy codec.
    """

    sequences: torch.Tensor
    num_loaded: int
    tiers: Mapping[str, int]
    lossy: bool
    output: object


async def cached_generate(
    model: PreTrainedModel,
    store: KVStore,
    input_ids: TokenIds,
    *,
    max_new_tokens: int,
    attention_mask: torch.Tensor | None = None,
    salt: str | bytes | None = None,
    lora: str | None = None,
    hint: Hint | None = None,
    **generate_kwargs: object,
) -> Generated:
    """Generate as `model.generate` does, loading the longest stored prefix and storing prompt and answer.

    Every row of `input_ids` ([tokens] or [batch, tokens]) begins at position 0: padding is refused. The model runs in
    a thread; when cancelled, generation ends at the next token, and what was stored stays stored. A store that has
    nothing, or fails, costs time, never the answer. Greedy decoding in float32 gives the tokens that it gives without
    a store.

    Raises:
        InvalidValueError: ids or arguments that cannot be used with stored KV.
        UnsupportedModelError, LayoutMismatchError: the model cannot be stored, or not in this store.
    """
    request = make_request(model, store, input_ids, Identity(salt=salt, lora=lora, hint=hint))
    check_unpadded(attention_mask, request)
    options = _options(request, max_new_tokens, generate_kwargs)
    loaded = await load(request)
    cache, num_loaded, tiers, lossy = loaded.cache, loaded.num_tokens, loaded.tiers, loaded.lossy
    del loaded  # its hits hold the memory that the first forward pass copies out of
    computed = max(num_loaded, request.chunks_before(request.num_tokens - 1))
    async with ModelThread() as thread:
        await compute(request, cache, begin=num_loaded, end=computed, lossy=lossy, thread=thread)
        output = await thread.run(_generate, request, cache, options, thread.stopping)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        answered = replace(request, ids=sequences.to("cpu", torch.int64))
        await save(answered, cache, start=computed, lossy=lossy, thread=thread)
    return Generated(sequences=sequences, num_loaded=num_loaded, tiers=tiers, lossy=lossy, output=output)


def _options(request: Request, max_new_tokens: int, given: Mapping[str, object]) -> dict[str, object]:
    """Check the arguments for `generate` and add what the adapter decides."""
    for name, value in given.items():
        reason = REFUSED.get(name)
        if reason is None and name.startswith(REFUSED_BEGINNINGS):
            reason = "images, video and audio are not part of the key"
        if reason is not None and value is not None:
            raise UnsupportedModelError(f"cached_generate cannot take {name}: {reason}")
    config = given.get("generation_config", request.model.generation_config)
    for name in ("num_beams", "num_return_sequences"):
        if given.get(name, getattr(config, name, None)) not in (None, 1):
            raise InvalidValueError(f"cached_generate cannot take {name} > 1; load_prefix and repeat the cache instead")
    if not given.get("use_cache", True):
        raise InvalidValueError("cached_generate cannot take use_cache=False: the cache is what it is for")
    return {
        **given,
        "max_new_tokens": max_new_tokens,
        "use_cache": True,
        "cache_implementation": None,  # the cache passed in decides, whatever the model's generation config says
    }


def _generate(
    request: Request, cache: DynamicCache, options: Mapping[str, object], stopping: threading.Event
) -> torch.Tensor | ModelOutput:
    """Run `generate` on the full ids: it skips by itself what the cache holds. Ends early once `stopping` is set."""

    def stop(input_ids: torch.Tensor, _scores: torch.Tensor, **_unused: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), stopping.is_set(), dtype=torch.bool, device=input_ids.device)

    model = request.model
    ids = request.ids.to(model.device)
    given = options.get("stopping_criteria")
    criteria = StoppingCriteriaList([*given, stop] if isinstance(given, list) else [stop])
    output: torch.Tensor | ModelOutput = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{**options, "stopping_criteria": criteria, cache_argument(model): cache},
    )
    return output

"""The reading half: stored KV becomes a transformers cache that a forward pass continues."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtier.adapters.transformers.plan import group_layers, new_cache
from kvtier.adapters.transformers.request import Identity, Request, TokenIds, make_request
from kvtier.adapters.transformers.threads import ModelThread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import DynamicCache, PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin

    from kvtier.keys import Hint
    from kvtier.store.kv import KVStore
    from kvtier.store.results import Hit


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A cache that holds the first `num_tokens` tokens of every row; empty after a miss.

    `hits` has one entry per row. The hits' tensors are what the cache's layers view until the first forward pass
    replaces them: drop this object early to give that memory back.
    """

    cache: DynamicCache
    num_tokens: int
    hits: tuple[Hit | None, ...]

    @property
    def hit(self) -> Hit | None:
        """The first row's hit: the only one unless a batch was given."""
        return self.hits[0]

    @property
    def lossy(self) -> bool:
        """Whether any loaded value went through a lossy codec: pass it on when saving what was computed on top."""
        return any(hit is not None and hit.lossy for hit in self.hits)

    @property
    def tiers(self) -> dict[str, int]:
        """Chunks served by each tier."""
        total: Counter[str] = Counter()
        for hit in self.hits:
            if hit is not None:
                total.update(hit.tiers)
        return dict(total)


async def load_prefix(
    model: PreTrainedModel,
    store: KVStore,
    input_ids: TokenIds,
    *,
    max_tokens: int | None = None,
    min_benefit_seconds: float | None = None,
    salt: str | bytes | None = None,
    lora: str | None = None,
    hint: Hint | None = None,
) -> Loaded:
    """Load the longest stored prefix of `input_ids` ([tokens] or [batch, tokens], no padding) into a new cache.

    At most all tokens but one: a model needs one token to say what comes next, and would silently run the whole
    prompt again on top of a cache that covers all of it. Rows of a batch get the length that all of them have.
    With `min_benefit_seconds` only what is there sooner than computed is loaded, as `KVStore.get` does.
    Pass the cache and the *full* ids to `model.generate`, or the cache and `ids[:, num_tokens:]` to `model`.

    Raises:
        InvalidValueError: ids that cannot be used, or `min_benefit_seconds` given but the store's `prefill` not set.
        UnsupportedModelError, LayoutMismatchError: the model cannot be stored, or not in this store.
    """
    request = make_request(model, store, input_ids, Identity(salt=salt, lora=lora, hint=hint))
    return await load(request, max_tokens=max_tokens, min_benefit_seconds=min_benefit_seconds)


async def load(request: Request, *, max_tokens: int | None = None, min_benefit_seconds: float | None = None) -> Loaded:
    """Do the work of `load_prefix` for a checked request."""
    limit = request.num_tokens - 1
    if max_tokens is not None:
        limit = min(limit, max_tokens)
    hits = await _load_rows(request, limit, min_benefit_seconds)
    if any(hit is None for hit in hits):
        return Loaded(cache=new_cache(request.model), num_tokens=0, hits=tuple(None for _ in hits))
    found = [hit for hit in hits if hit is not None]
    num_tokens = found[0].num_tokens
    rows = [hit.kv for hit in found]
    if len(rows) == 1 and request.model.device.type == "cpu":
        cache = build_cache(request, rows, num_tokens)  # views only
    else:
        async with ModelThread() as thread:
            cache = await thread.run(build_cache, request, rows, num_tokens)
    return Loaded(cache=cache, num_tokens=num_tokens, hits=tuple(found))


async def _load_rows(request: Request, limit: int, min_benefit_seconds: float | None) -> list[Hit | None]:
    """Return one hit per row, all of one length (the longest that every row has), or a `None` among them."""
    store, hint = request.store, request.identity.hint
    prefixes = [request.prefix(row, request.num_tokens) for row in range(request.rows)]
    if request.rows > 1:  # ask first, so that a row with little in store does not make the others read in vain
        limit = min([limit, *[await store.exists(prefix) for prefix in prefixes]])
    while limit > 0:
        hits = [
            await store.get(prefix, max_tokens=limit, hint=hint, min_benefit_seconds=min_benefit_seconds)
            for prefix in prefixes
        ]
        reached = min(0 if hit is None else hit.num_tokens for hit in hits)
        if reached == 0 or all(hit is not None and hit.num_tokens == reached for hit in hits):
            return hits
        limit = reached  # a chunk went away meanwhile, or did not pay: try the length that is left
    return [None] * request.rows


def build_cache(request: Request, rows: Sequence[object], num_tokens: int) -> DynamicCache:
    """Make a cache of `num_tokens` tokens out of one kv per row; its layers view the given tensors where they can."""
    layout = request.store.layout
    matched = [layout.match(kv, tokens=num_tokens) for kv in rows]
    cache = new_cache(request.model)
    for group in request.groups:
        keys = _batch([kv[group.name] for kv in matched], "k", layout.axes, request.model.device)
        values = _batch([kv[group.name] for kv in matched], "v", layout.axes, request.model.device)
        for position, layer in enumerate(group_layers(cache, group)):
            fill_layer(layer, keys[position], values[position], num_tokens)
    return cache


def fill_layer(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
    """Make `layer` hold these tensors ([batch, heads, tokens, dim]) as the state after `num_tokens` tokens.

    The tensors are kept, not copied: `update` joins them with new tokens into new memory and never writes into them.
    """
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        # Without it, masks and positions believe that the window's tail is the whole prompt: wrong, and no error.
        layer.cumulative_length = num_tokens


def _batch(rows: Sequence[Mapping[str, torch.Tensor]], name: str, axes: str, device: torch.device) -> torch.Tensor:
    """Return [layers, batch, heads, tokens, dim] on `device`: a view for one row on its device, else one copy."""
    tensors = [row[name].permute(0, 2, 1, 3) if axes == "LTHD" else row[name] for row in rows]
    moved = [tensor.to(device) for tensor in tensors]
    return moved[0][:, None] if len(moved) == 1 else torch.stack(moved, dim=1)

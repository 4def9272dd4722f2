"""The writing half: keys and values of a cache become stored chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtier.adapters.transformers.plan import cache_layers, group_layers
from kvtier.adapters.transformers.request import Identity, Request, TokenIds, make_request
from kvtier.adapters.transformers.threads import ModelThread
from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache, CacheLayerMixin

    from kvtier.keys import Hint
    from kvtier.store.kv import KVStore
    from kvtier.store.results import PutResult

PIECE_TOKENS = 1024  # copied and put at a time: bounds the copy's memory


async def save_prefix(
    model: PreTrainedModel,
    store: KVStore,
    input_ids: TokenIds,
    cache: Cache,
    *,
    start: int = 0,
    lossy: bool = False,
    salt: str | bytes | None = None,
    lora: str | None = None,
    hint: Hint | None = None,
) -> tuple[PutResult, ...]:
    """Store the whole chunks of `input_ids` that `cache` holds from token `start` on; one result per put.

    `input_ids` are the tokens that the cache was computed from, prompt and generated ones alike; tokens past the
    cache's length are ignored (the last generated token has no KV yet). Pass `start=loaded.num_tokens` and
    `lossy=loaded.lossy` after `load_prefix`. The cache may change as soon as this returns.

    Raises:
        InvalidValueError: the cache does not belong to these ids by its shape, or a sliding layer has already dropped
            tokens that must be stored (use `prefill`, or `cache.activate_past_recording()` before the forward pass).
        UnsupportedCacheLayerError: a cache that does not show its keys and values per token.
        UnsupportedModelError, LayoutMismatchError: the model cannot be stored, or not in this store.
    """
    request = make_request(model, store, input_ids, Identity(salt=salt, lora=lora, hint=hint))
    cache_layers(cache)
    async with ModelThread() as thread:
        return tuple(await save(request, cache, start=start, lossy=lossy, thread=thread))


async def save(request: Request, cache: Cache, *, start: int, lossy: bool, thread: ModelThread) -> list[PutResult]:
    """Put every whole chunk in [start, length of the cache), piece by piece, row by row."""
    length = cache.get_seq_length()
    begin = request.chunks_after(start)
    end = request.chunks_before(min(length, request.num_tokens))
    results: list[PutResult] = []
    if begin >= end:
        return results
    check_held(request, cache, begin)
    step = max(request.chunk_tokens, request.chunks_before(PIECE_TOKENS))
    for low in range(begin, end, step):
        high = min(low + step, end)
        for row in range(request.rows):
            kv = await thread.run(copy_out, request, cache, row, low, high)
            prefix = request.prefix(row, high)
            results.append(await request.store.put(prefix, kv, start=low, lossy=lossy, hint=request.identity.hint))
    return results


def check_held(request: Request, cache: Cache, begin: int) -> None:
    """Refuse a cache that lacks tokens from `begin` on, or whose batch is another one.

    Raises:
        InvalidValueError: as said.
    """
    length = cache.get_seq_length()
    for group in request.groups:
        for index, layer in zip(group.layers, group_layers(cache, group), strict=True):
            if layer.keys is None or layer.keys.dim() != len("BHTD") or layer.keys.shape[0] != request.rows:
                shape = None if layer.keys is None else tuple(layer.keys.shape)
                raise InvalidValueError(
                    f"cache layer {index} holds keys of shape {shape}; needed: "
                    f"[{request.rows}, heads, tokens, dim] for {request.rows} row(s) of input_ids"
                )
            held_from = length - layer.keys.shape[-2]
            if held_from < 0 or (held_from > begin and not isinstance(layer, DynamicSlidingWindowLayer)):
                raise InvalidValueError(
                    f"cache layer {index} holds {layer.keys.shape[-2]} tokens where the cache counts {length}: "
                    "a pruned cache cannot be stored by prefix"
                )
            if held_from > begin:
                raise InvalidValueError(
                    f"cache layer {index} has a window of {layer.sliding_window} and has dropped the tokens before "
                    f"{held_from}; to store from {begin}, use prefill(), or call cache.activate_past_recording() "
                    "before the forward pass"
                )


def copy_out(request: Request, cache: Cache, row: int, low: int, high: int) -> dict[str, dict[str, torch.Tensor]]:
    """Copy tokens [low, high) of one row into new host tensors in the store's layout, by group."""
    length = cache.get_seq_length()
    axes = request.store.layout.axes
    return {
        group.name: _copy_group(group_layers(cache, group), axes, row, low - length, high - length)
        for group in request.groups
    }


def _copy_group(layers: Sequence[CacheLayerMixin], axes: str, row: int, low: int, high: int) -> dict[str, torch.Tensor]:
    """Copy tokens [low, high), counted back from each layer's end (both <= 0)."""
    picked = {
        "k": [_tokens(layer.keys[row], low, high) for layer in layers],
        "v": [_tokens(layer.values[row], low, high) for layer in layers],
    }
    return {name: _stack(tensors, axes) for name, tensors in picked.items()}


def _tokens(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    held = tensor.shape[-2]
    return tensor[:, held + low : held + high]


def _stack(tensors: Sequence[torch.Tensor], axes: str) -> torch.Tensor:
    if axes == "LTHD":
        tensors = [tensor.transpose(0, 1) for tensor in tensors]
    return torch.stack([tensor.detach() for tensor in tensors]).cpu()

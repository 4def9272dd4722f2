"""One adapter call's subject: a model, a store and the token rows of a batch, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvtier.adapters.transformers.plan import GroupPlan, plan
from kvtier.errors import InvalidValueError
from kvtier.keys import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvtier.keys import Hint
    from kvtier.store.kv import KVStore

ROWS_AND_TOKENS = 2  # dimensions of a batch of token ids

TokenIds: TypeAlias = "torch.Tensor | Sequence[int] | Sequence[Sequence[int]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What besides the tokens decides whether two prompts share KV, and how the store should treat them."""

    salt: str | bytes | None = None
    lora: str | None = None
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked call; `ids` is [batch, tokens], int64, on the CPU."""

    model: PreTrainedModel
    store: KVStore
    ids: torch.Tensor
    identity: Identity
    groups: tuple[GroupPlan, ...]

    @property
    def rows(self) -> int:
        """Number of prompts in the batch."""
        return self.ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of each prompt."""
        return self.ids.shape[1]

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one stored chunk."""
        return self.store.chunk_tokens

    def prefix(self, row: int, end: int) -> Prefix:
        """Return the first `end` tokens of a row as the store's key."""
        return Prefix(self.ids[row, :end], salt=self.identity.salt, lora=self.identity.lora)

    def chunks_before(self, position: int) -> int:
        """Return the last chunk boundary at or before `position`."""
        return position // self.chunk_tokens * self.chunk_tokens

    def chunks_after(self, position: int) -> int:
        """Return the first chunk boundary at or after `position`."""
        return -(-position // self.chunk_tokens) * self.chunk_tokens


def make_request(model: PreTrainedModel, store: KVStore, input_ids: TokenIds, identity: Identity) -> Request:
    """Check the subject of a call.

    Raises:
        InvalidValueError: ids that are no rows of at least one integer token.
        UnsupportedModelError, LayoutMismatchError: the model cannot be stored, or not in this store.
    """
    ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.tensor(input_ids)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != ROWS_AND_TOKENS or ids.numel() == 0 or ids.dtype.is_floating_point or ids.dtype is torch.bool:
        raise InvalidValueError(
            f"input_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; "
            "needed: integers, [tokens] or [batch, tokens], at least one token"
        )
    return Request(
        model=model,
        store=store,
        ids=ids.detach().to("cpu", torch.int64),
        identity=identity,
        groups=plan(model, store.layout),
    )


def check_unpadded(attention_mask: torch.Tensor | None, request: Request) -> None:
    """Refuse padded rows: their KV sits at other positions than the same tokens without padding.

    Raises:
        InvalidValueError: the mask holds a zero, or has another shape than the ids.
    """
    if attention_mask is None:
        return
    if tuple(attention_mask.shape) != tuple(request.ids.shape):
        raise InvalidValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(request.ids.shape)}"
        )
    if not bool(attention_mask.bool().all()):
        raise InvalidValueError(
            "attention_mask masks tokens (padding): stored KV needs every prompt to begin at position 0; "
            "pass rows of different lengths one by one, without padding"
        )

"""A model small enough to check by hand: its KV at a token depends on that token and on all tokens before it."""

from collections.abc import Sequence

import torch

import kvtier

LAYERS, HEADS, DIM = 2, 2, 16
LAYOUT = kvtier.KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32")
NAMESPACE = kvtier.Namespace(model="example/toy", revision="1")


def compute(tokens: Sequence[int], start: int) -> dict[str, torch.Tensor]:
    """Return the KV of tokens[start:], each tensor [layers, tokens, heads, dim]."""
    sums = torch.cumsum(torch.tensor(tokens, dtype=torch.float32), dim=0)[start:]
    grid = torch.arange(LAYERS * HEADS * DIM, dtype=torch.float32).reshape(LAYERS, 1, HEADS, DIM)
    return {"k": grid + sums.reshape(1, -1, 1, 1), "v": grid - sums.reshape(1, -1, 1, 1)}


def answer(kv: dict[str, torch.Tensor]) -> float:
    """Return what the model says after reading a whole prompt: wrong as soon as a single value of its KV is wrong."""
    return float((kv["k"] * kv["v"]).double().sum())

"""Quantisers that others use, as functions on [heads, tokens, channels] in float32: what ours are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Scheme = tuple["Callable[[torch.Tensor], torch.Tensor]", "Callable[[torch.Tensor], torch.Tensor]", float]


def _affine(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise along the last axis between minimum and maximum."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-30)
    return ((x - low) / step).round() * step + low


def _symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    step = (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-30)
    return (x / step).round() * step


def per_token(bits: int, group: int, *, symmetric: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """Groups of channels within a token and head."""
    quantise = _symmetric if symmetric else _affine
    return lambda x: quantise(x.unflatten(-1, (-1, min(group, x.shape[-1]))), bits).flatten(-2)


def per_channel(bits: int, group: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Groups of tokens within a channel."""

    def quantise(x: torch.Tensor) -> torch.Tensor:
        parts = [_affine(part.transpose(1, 2), bits).transpose(1, 2) for part in x.split(group, dim=1)]
        return torch.cat(parts, 1)

    return quantise


def per_tensor(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One scale for the whole chunk of a layer."""
    return lambda x: _symmetric(x.reshape(1, -1), bits).reshape(x.shape)


def unscaled_fp8(x: torch.Tensor) -> torch.Tensor:
    """A cast to e4m3, and no more."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def rounded_again(x: torch.Tensor) -> torch.Tensor:
    """Another rounding to bfloat16, on a grid that lies elsewhere: what any computation with these numbers does."""
    return (x * 1.37).to(torch.bfloat16).float() / 1.37


FIELD: dict[str, Scheme] = {
    "bfloat16, rounded once more": (rounded_again, rounded_again, 16.0),
    "int8 per tensor": (per_tensor(8), per_tensor(8), 8.0),
    "int8 g32 (q8_0)": (per_token(8, 32, symmetric=True), per_token(8, 32, symmetric=True), 8.5),
    "fp8 e4m3 without a scale": (unscaled_fp8, unscaled_fp8, 8.0),
    "int4 g32 per token (q4_1)": (per_token(4, 32), per_token(4, 32), 5.0),
    "int4 g32, K per channel (KIVI)": (per_channel(4, 32), per_token(4, 32), 5.0),
    "int4 g64 per token": (per_token(4, 64), per_token(4, 64), 4.5),
    "int3 g32, K per channel": (per_channel(3, 32), per_token(3, 32), 4.0),
}
"""Name -> what it does to keys, what it does to values, bits per number with scales and minima of 16 bits."""

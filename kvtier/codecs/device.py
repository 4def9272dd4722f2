"""Quantising where the tensors are: on their device, so that only codes and limits cross to the host."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvtier.codecs import eager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.codecs.plan import Plan

_SCHEMES = {
    ("channel", 8, False),
    ("channel", 5, False),
    ("channel", 4, False),
    ("token", 8, True),
    ("token", 4, False),
}
_MOST_ROWS = 256  # of a chunk in one program; longer ones take torch's route
_CHANNELS = 32  # in one program
_TOKENS = 16  # in one program


def encode(blocks: torch.Tensor, plan: Plan) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Quantise [blocks, rows, channels] on its device; return how many groups were marked, limits and planes there.

    With Triton, which comes with CUDA builds of torch, for bfloat16; else with torch's operations.
    """
    limits = torch.empty(plan.limit_shape, dtype=eager.BITS[blocks.dtype].integer, device=blocks.device)
    planes = [
        torch.empty((plan.blocks, rows, plan.channels), dtype=torch.uint8, device=blocks.device)
        for rows in plan.plane_rows
    ]
    if not triton_suits(plan, blocks):
        return eager.encode(blocks, plan, limits, planes), limits, planes
    _launch("encode", blocks, plan, limits, planes)
    return int((limits == eager.MARK).sum()), limits, planes


def decode(blocks: torch.Tensor, plan: Plan, limits: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
    """Fill [blocks, rows, channels] on its device from limits and planes there."""
    if triton_suits(plan, blocks):
        _launch("decode", blocks, plan, limits, planes)
    else:
        eager.decode(blocks, plan, limits, planes)


def triton_suits(plan: Plan, blocks: torch.Tensor) -> bool:
    """Tell whether there is a kernel for this, and Triton to compile it."""
    scheme = plan.scheme
    if blocks.dtype != torch.bfloat16 or scheme.floating or find_spec("triton") is None:
        return False
    if (scheme.along, scheme.bits, scheme.symmetric) not in _SCHEMES:
        return False
    return plan.even if scheme.along == "token" else _longest(plan) <= _MOST_ROWS


def _longest(plan: Plan) -> int:
    return max(stop - start for start, stop in pairwise(plan.starts))


def _launch(verb: str, blocks: torch.Tensor, plan: Plan, limits: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
    from kvtier.codecs import _triton  # noqa: PLC0415  # optional

    scheme = plan.scheme
    words = blocks.view(torch.int16)
    sizes = (blocks.stride(0), blocks.stride(1), plan.rows, plan.channels, plan.groups)
    constants = {"BITS": scheme.bits, "SYMMETRIC": int(scheme.symmetric), "enable_fp_fusion": False}
    kernel: Callable[..., object]
    if scheme.along == "channel":
        kernel = getattr(_triton, f"{verb}_channels")
        starts = torch.tensor(plan.starts, dtype=torch.int32, device=blocks.device)
        grid = (plan.blocks, plan.groups, -(-plan.channels // _CHANNELS))
        shape = {"ROWS": max(8, _power_of_two(_longest(plan))), "WIDE": _CHANNELS}
        kernel[grid](words, limits, planes[0], planes[-1], starts, *sizes, **shape, **constants)  # type: ignore[index]  # Triton's way to launch
    else:
        kernel = getattr(_triton, f"{verb}_tokens")
        width = plan.head // plan.head_groups
        grid = (plan.blocks, -(-plan.rows // _TOKENS), plan.groups)
        shape = {"ROWS": _TOKENS, "WIDE": _power_of_two(width)}
        kernel[grid](words, limits, planes[0], *sizes, width, **shape, **constants)  # type: ignore[index]  # likewise


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()

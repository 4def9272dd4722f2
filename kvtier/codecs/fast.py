"""The fast route for bfloat16 where numba is installed (`pip install 'kvtier[fast]'`); the same bytes as `eager`."""

from __future__ import annotations

import logging
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvtier.codecs.plan import NARROWEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.codecs.plan import Plan

Route: TypeAlias = "Callable[[torch.Tensor, Plan, int], int]"

_lock = threading.Lock()
_installed = find_spec("numba") is not None and sys.byteorder == "little"  # kernels take numbers apart in place
_compiled: dict[tuple[str, str, int, int], Callable[..., int] | None] = {}
_BITS = {"channel": {8, 5, 4}, "token": {8, 4}}
COMMON = 64  # the width of groups that has kernels of its own
_LANES = {"channel": (64, 32), "token": (16,)}


def encoder(plan: Plan, dtype: torch.dtype) -> Route | None:
    """Return a function for blocks [..., tokens, channels] of any strides, a plan and a stored segment's address.

    It does what `eager.encode` does. None if there is no kernel.
    """
    return _route("encode", plan) if _suits(plan, dtype) else None


def decoder(plan: Plan, dtype: torch.dtype) -> Route | None:
    """Return a function that does what `eager.decode` does, likewise."""
    return _route("decode", plan) if _suits(plan, dtype) else None


def _suits(plan: Plan, dtype: torch.dtype) -> bool:
    scheme = plan.scheme
    if not _installed or dtype != torch.bfloat16 or scheme.floating or scheme.bits not in _BITS[scheme.along]:
        return False
    if scheme.along == "token":
        return plan.even and scheme.symmetric == (scheme.bits == 8)  # noqa: PLR2004  # a byte
    return not scheme.symmetric


def _route(verb: str, plan: Plan) -> Route | None:
    along, bits = plan.scheme.along, plan.scheme.bits
    width = plan.head // plan.head_groups if along == "token" else plan.channels
    call = _kernel(verb, f"{along}{bits}", *_variant(along, width))
    if call is None:
        return None

    def run(blocks: torch.Tensor, plan: Plan, stored: int) -> int:
        outer, inner = blocks.shape[0], blocks.shape[1] if blocks.dim() == 4 else 1  # noqa: PLR2004  # LHTD
        steps = (outer, blocks.stride(0), inner, blocks.stride(1), blocks.stride(-2))
        where = (blocks.data_ptr(), *steps, plan.rows)
        parts = [stored + offset for offset in (plan.limits_at, *plan.planes_at)]
        if along == "token":
            return call(*where, plan.groups, width, *parts)
        return call(*where, plan.channels, _numbers(plan.starts), *parts)

    return run


def _variant(along: str, width: int) -> tuple[int, int]:
    """Return the lanes of a kernel's vectors, and the width of groups if it is one that has a kernel of its own."""
    if along == "token" and width == COMMON:
        return COMMON, COMMON
    fitting = (lanes for lanes in _LANES[along] if lanes <= width)
    return next(fitting, NARROWEST), 0


def kernel(verb: str, scheme: str) -> Callable[..., int] | None:
    """Return a kernel of `kvtier.codecs._numba` by name, None without numba."""
    return _kernel(verb, scheme, 0, 0) if _installed else None


def _kernel(verb: str, scheme: str, lanes: int, fixed: int) -> Callable[..., int] | None:
    """Return a kernel, compiled when first asked for; numba keeps the result on disk for later processes.

    None if numba is there but does not suit this Python or numpy.
    """
    mark = (verb, scheme, lanes, fixed)
    if mark not in _compiled:
        with _lock:
            if mark not in _compiled:
                _compiled[mark] = _compile(*mark)
    return _compiled[mark]


def _compile(verb: str, scheme: str, lanes: int, fixed: int) -> Callable[..., int] | None:
    try:
        from kvtier.codecs import _numba  # noqa: PLC0415  # optional, and slow to import
    except ImportError as exc:
        logging.getLogger(__name__).warning("numba cannot be used, codecs take torch's route: %s", exc)
        return None
    compiled: Callable[..., int] = _numba.compiled(verb, scheme, lanes, fixed)  # type: ignore[no-untyped-call]  # numba
    return compiled


@lru_cache(maxsize=1024)
def _numbers(starts: tuple[int, ...]) -> object:
    return torch.tensor(starts, dtype=torch.int64).numpy()

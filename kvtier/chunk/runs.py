"""Long runs of memory, copied by numpy: its inner loop is the C library's memcpy, which torch's is not."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

HAS_NUMPY: bool = importlib.util.find_spec("numpy") is not None
LEAST_RUN: Final = 4 << 10  # bytes; with shorter ones torch is faster
LEAST_CALL: Final = 4 << 20  # bytes; each call gives the GIL up, and may wait milliseconds to get it back


def copy_runs(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Copy each source to its target, in order, if both are long runs of host memory; tell whether that was done.

    Tensors of integers, pair by pair of one dtype and shape.
    """
    if not HAS_NUMPY or any(_run_bytes(*pair) < LEAST_RUN for pair in zip(targets, sources, strict=True)):
        return False
    calls = []
    for group in _groups(targets, sources):
        whole = ([targets[at] for at in group], [sources[at] for at in group])
        # Where one side's memory lies between the other's, numpy copies to a buffer of its own first.
        calls += [whole] if _apart(*whole) else [([target], [source]) for target, source in zip(*whole, strict=True)]
    if any(sum(target.nbytes for target in call[0]) < LEAST_CALL or not _apart(*call) for call in calls):
        return False
    import numpy as np  # noqa: PLC0415  # only where it is installed

    for call in calls:
        np.copyto(_stacked(call[0]), _stacked(call[1]))
    return True


def _run_bytes(target: torch.Tensor, source: torch.Tensor) -> int:
    """Return how many bytes lie in one piece both here and there; 0 where a side is no host memory."""
    if target.device.type != "cpu" or source.device.type != "cpu":
        return 0
    run = 1
    for length, *steps in zip(
        reversed(target.shape), reversed(target.stride()), reversed(source.stride()), strict=True
    ):
        if length > 1 and steps != [run, run]:
            break
        run *= length
    return run * target.element_size()


def _groups(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[range]:
    """Split the pairs so that those of a group are alike and equally far from each other, on either side."""
    kinds = [(t.shape, t.stride(), s.stride(), t.dtype) for t, s in zip(targets, sources, strict=True)]
    places = [(t.data_ptr(), s.data_ptr()) for t, s in zip(targets, sources, strict=True)]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
    groups, first = [], 0
    for at in range(1, len(kinds)):
        if kinds[at] != kinds[first] or steps[at - 1] != steps[first]:
            groups.append(range(first, at))
            first = at
    return [*groups, range(first, len(kinds))]


def _apart(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Tell whether all targets lie before all sources, or behind them."""
    first, second = _extent(targets), _extent(sources)
    return first.stop <= second.start or second.stop <= first.start


def _extent(tensors: Sequence[torch.Tensor]) -> range:
    """Return the addresses from the first byte of tensors that are alike to the last one."""
    spans = zip(tensors[0].shape, tensors[0].stride(), strict=True)
    size = (1 + sum((length - 1) * step for length, step in spans)) * tensors[0].element_size()
    places = [tensor.data_ptr() for tensor in tensors]
    return range(min(places), max(places) + size)


def _stacked(tensors: Sequence[torch.Tensor]) -> NDArray[np.generic]:
    """Return one array over tensors that are alike and equally far from each other; they must outlive it."""
    import numpy as np  # noqa: PLC0415  # only where it is installed

    first: NDArray[np.generic] = tensors[0].numpy()
    if len(tensors) == 1:
        return first
    step = tensors[1].data_ptr() - tensors[0].data_ptr()  # bytes, also backwards: as any stride
    return np.lib.stride_tricks.as_strided(first, (len(tensors), *first.shape), (step, *first.strides))

"""Tokens in blocks as numbered rows of bytes: numpy takes and assigns them in one call, at nearly memcpy's speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvtier.chunk.runs import HAS_NUMPY

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvtier.paged.places import Places


@dataclass(frozen=True, slots=True)
class Rows:
    """The largest pieces of memory that lie in one piece both in the blocks and in a chunk.

    A whole block of a layer where the engine's order is the chunk's; else a token, or one head of a token (for a chunk
    with heads before tokens, one head of a block).
    """

    numbers: NDArray[np.int64]  # in the blocks, in the order of the chunk's memory
    size: int  # elements of a row
    span: int  # elements from the first block's begin to the last one's end
    heads_first: bool

    def gather(self, stacked: torch.Tensor, chunk: torch.Tensor) -> None:
        """Copy blocks to a chunk."""
        import numpy as np  # noqa: PLC0415  # only where it is installed

        # "clip": without it numpy fills a buffer first; the numbers were checked before.
        np.take(self._blocks(stacked), self.numbers, out=self._chunk(chunk), mode="clip")

    def scatter(self, stacked: torch.Tensor, chunk: torch.Tensor) -> None:
        """Copy a chunk to blocks."""
        self._blocks(stacked)[self.numbers] = self._chunk(chunk)

    def _blocks(self, stacked: torch.Tensor) -> NDArray[np.void]:
        return self._as_rows(stacked.as_strided((self.span,), (1,)))

    def _chunk(self, chunk: torch.Tensor) -> NDArray[np.void]:
        return self._as_rows((chunk.transpose(1, 2) if self.heads_first else chunk).view(-1))

    def _as_rows(self, flat: torch.Tensor) -> NDArray[np.void]:
        import numpy as np  # noqa: PLC0415  # only where it is installed

        # Rows of no type: where they are small, numpy assigns them a third faster than rows of numbers.
        return flat.numpy().view(np.dtype((np.void, self.size * flat.element_size())))


def rows_of(stacked: torch.Tensor, places: Places, chunk: torch.Tensor) -> Rows | None:
    """Return the rows of pages [L, B, N, ...] and a chunk [L, T, ...], both of integers; None where there are none.

    There are where elements lie side by side in the blocks, and the chunk is dense in this order or with heads before
    tokens. They serve all pages and chunks of the same shapes and strides.
    """
    if not HAS_NUMPY or stacked.is_cuda or chunk.is_cuda or not places.tokens:
        return None
    heads_first = not chunk.is_contiguous()
    if heads_first and (chunk.dim() != 4 or not chunk.transpose(1, 2).is_contiguous()):  # noqa: PLR2004  # [L, T, H, D]
        return None
    alike = (stacked.shape, stacked.stride(), heads_first)  # keys and values, and all layers, as a rule
    if alike not in places.rows:
        places.rows[alike] = _number(stacked, places, heads_first=heads_first)
    return places.rows[alike]


class _Dim(NamedTuple):
    """Where the elements of one dimension of the chunk begin in the blocks."""

    begins: NDArray[np.int64]
    steps: tuple[int, ...]  # that the distances between them are made of
    even: bool  # one step apart from each other


def _number(stacked: torch.Tensor, places: Places, *, heads_first: bool) -> Rows | None:
    import numpy as np  # noqa: PLC0415  # only where it is installed

    # A dimension of length 1 has no distance between its elements.
    steps = [step if length > 1 else 0 for length, step in zip(stacked.shape, stacked.stride(), strict=True)]
    layer, _, token, *heads, last = [
        _Dim(np.arange(length) * step, (step,), even=True) for length, step in zip(stacked.shape, steps, strict=True)
    ]
    if places.blocks is not None:
        tokens = [_Dim(np.array(places.blocks) * steps[1], (steps[1],), even=False), token]
    else:
        tokens = [_Dim(places.begins(steps[1], steps[2]), (steps[1], steps[2]), even=False)]
    dims = [layer, *heads, *tokens, last] if heads_first else [layer, *tokens, *heads, last]
    size = 1
    while dims[-1].even and (len(dims[-1].begins) == 1 or dims[-1].steps == (size,)):
        size *= len(dims.pop().begins)
    if dims[-1] is last or any(step % size for dim in dims for step in dim.steps):
        return None
    numbers = np.zeros(1, dtype=np.int64)
    for dim in dims:
        numbers = (numbers[:, None] + dim.begins // size).ravel()
    span = 1 + sum((length - 1) * step for length, step in zip(stacked.shape, steps, strict=True))
    return Rows(numbers, size, span, heads_first)

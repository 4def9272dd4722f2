"""Where tokens lie in an engine's blocks: by block table or by slot mapping, as runs of neighbouring slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtier.paged.rows import Rows


@dataclass(frozen=True, slots=True)
class Run:
    """`tokens` tokens that lie side by side in one block, and where they stand among the tokens asked for."""

    block: int
    offset: int  # in the block
    token: int
    tokens: int


class Places:
    """Places of consecutive tokens: whole blocks, or runs of neighbouring slots."""

    def __init__(self, tokens: int, *, blocks: Sequence[int] | None = None, runs: Sequence[Run] = ()) -> None:
        self.tokens: int = tokens
        self.blocks: Sequence[int] | None = blocks  # if the tokens fill whole blocks: the fast way
        self.rows: dict[object, Rows | None] = {}  # by what they are the same for
        self._runs = runs

    @property
    def runs(self) -> Sequence[Run]:
        """The places as runs, in the tokens' order."""
        if not self._runs and self.blocks:
            size = self.tokens // len(self.blocks)
            self._runs = [Run(block, 0, i * size, size) for i, block in enumerate(self.blocks)]
        return self._runs

    def begins(self, block_step: int, token_step: int) -> NDArray[np.int64]:
        """Return where each token begins, for the distances between blocks and between tokens of a block."""
        import numpy as np  # noqa: PLC0415  # only where it is installed

        firsts = [run.block * block_step + run.offset * token_step for run in self.runs]
        return np.concatenate(
            [first + np.arange(run.tokens) * token_step for first, run in zip(firsts, self.runs, strict=True)]
        )


class BlockTable:
    """Token i lies in block `blocks[i // block_tokens]`."""

    def __init__(self, blocks: Sequence[int] | torch.Tensor, *, block_tokens: int, num_blocks: int) -> None:
        self._blocks = _integers("blocks", blocks, below=num_blocks)
        self._size = block_tokens
        self.tokens: int = len(self._blocks) * block_tokens

    def places(self, start: int, stop: int) -> Places:
        """Return where tokens [start, stop) lie."""
        size = self._size
        if start % size == 0 and stop % size == 0:
            return Places(stop - start, blocks=self._blocks[start // size : stop // size])
        cuts = [start, *range((start // size + 1) * size, stop, size), stop]
        runs = [
            Run(self._blocks[low // size], low % size, low - start, high - low)
            for low, high in pairwise(cuts)
            if high > low
        ]
        return Places(stop - start, runs=runs)

    def check_distinct(self) -> None:
        """Raise `InvalidValueError` if two tokens would be written to one place."""
        _distinct("blocks", self._blocks)


class SlotMapping:
    """Token i lies in slot `slots[i]`: block `slot // block_tokens`, place `slot % block_tokens`."""

    def __init__(self, slots: Sequence[int] | torch.Tensor, *, block_tokens: int, num_blocks: int) -> None:
        self._slots = _integers("slots", slots, below=num_blocks * block_tokens)
        self._size = block_tokens
        self.tokens: int = len(self._slots)

    def places(self, start: int, stop: int) -> Places:
        """Return where tokens [start, stop) lie."""
        runs: list[Run] = []
        slots, size, low = self._slots, self._size, start
        while low < stop:
            block, offset = divmod(slots[low], size)
            high = low + 1
            while high < stop and offset + high - low < size and slots[high] == slots[low] + high - low:
                high += 1
            runs.append(Run(block, offset, low - start, high - low))
            low = high
        whole = all(run.tokens == size for run in runs)
        return Places(stop - start, blocks=[run.block for run in runs] if whole else None, runs=runs)

    def check_distinct(self) -> None:
        """Raise `InvalidValueError` if two tokens would be written to one place."""
        _distinct("slots", self._slots)


def _integers(what: str, given: Sequence[int] | torch.Tensor, *, below: int) -> list[int]:
    if isinstance(given, torch.Tensor):
        if given.dtype not in {torch.int32, torch.int64} or given.dim() != 1:
            raise InvalidValueError(f"{what}: a one-dimensional int32 or int64 tensor is needed, not {given.dtype}")
        given = given.tolist()
    numbers = list(given)
    for place, number in enumerate(numbers):
        if type(number) is not int or not 0 <= number < below:
            raise InvalidValueError(f"{what}[{place}] is {number!r}: must be a number from 0 to {below - 1}")
    return numbers


def _distinct(what: str, numbers: Sequence[int]) -> None:
    if len(set(numbers)) != len(numbers):
        raise InvalidValueError(f"{what} names a place twice: two tokens would be written over each other")

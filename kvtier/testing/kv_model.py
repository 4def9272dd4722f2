"""What a KVStore without limits must answer: a dict of stored objects, searched by brute force."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvtier.testing.kv_values import kv_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.layout import KVLayout, LayerGroup
    from kvtier.testing.kv_values import Prompt

Thing: TypeAlias = "tuple[str, tuple[tuple[int, ...], tuple[str, ...]], bool]"
"""One stored object: its layer group, what its tokens are keyed by, and whether it is an incomplete tail."""


@dataclass
class DictModel:
    """Follows every put and delete; `things` maps what is stored to the `take` of the put that stored it.

    Nothing here is taken from the store's own planning: lengths and tokens are counted one by one.
    """

    layout: KVLayout
    chunk_tokens: int
    things: dict[Thing, int] = field(default_factory=dict)

    def thing_with(self, group: str, prompt: Prompt, position: int) -> Thing:
        """Return the object that holds one token of a prompt."""
        total = len(prompt.tokens)
        stop = (position // self.chunk_tokens + 1) * self.chunk_tokens
        tail = stop > total
        return group, prompt.identity(min(stop, total), self.chunk_tokens), tail

    def put(
        self, prompt: Prompt, *, start: int, held: Mapping[str, int], partial: bool, take: int, only_new: bool = True
    ) -> list[Thing]:
        """Store what a put of [start, end) stores; `held` says how many last tokens each group came with."""
        total, stored = len(prompt.tokens), []
        for group in self.layout.groups:
            first = max(start, total - held.get(group.name, total))
            for begin in range(0, total, self.chunk_tokens):
                end = min(begin + self.chunk_tokens, total)
                thing = self.thing_with(group.name, prompt, begin)
                if begin < first or (thing[2] and not partial):
                    continue
                stored.append(thing)
                if not only_new or thing not in self.things:
                    self.things[thing] = take
                assert end > begin
        return stored

    def delete(self, prompt: Prompt, *, start: int) -> int:
        """Delete every object of a prompt that lies wholly behind `start`; return how many there were."""
        begins = [begin for begin in range(0, len(prompt.tokens), self.chunk_tokens) if begin >= start]
        things = {self.thing_with(group.name, prompt, begin) for group in self.layout.groups for begin in begins}
        return sum(self.things.pop(thing, None) is not None for thing in things)

    def needs(self, group: LayerGroup, length: int) -> range:
        """Return the positions that a group must have for a length, as the contract says it."""
        return range(0 if group.window is None else max(0, length - (group.window - 1)), length)

    def usable(self, prompt: Prompt, cap: int | None = None) -> int:
        """Return the greatest usable length up to `cap`: every group has what it needs, token by token."""
        total = len(prompt.tokens)
        has = {
            group.name: [self.thing_with(group.name, prompt, at) in self.things for at in range(total)]
            for group in self.layout.groups
        }
        for length in range(min(total, total if cap is None else cap), 0, -1):
            if all(has[group.name][at] for group in self.layout.groups for at in self.needs(group, length)):
                return length
        return 0

    def kv(self, prompt: Prompt, *, start: int, length: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return what a hit of `length` tokens holds from `start` on, each object's tokens from the put that came."""
        kv: dict[str, dict[str, torch.Tensor]] = {}
        for group in self.layout.groups:
            positions = [at for at in self.needs(group, length) if at >= start]
            takes = [self.things[self.thing_with(group.name, prompt, at)] for at in positions]
            kv[group.name] = {}
            specs = self.layout.specs(group.name, tokens=1, first_token=0)
            first = positions[0] if positions else length
            every = {
                take: kv_of(self.layout, prompt, chunk_tokens=self.chunk_tokens, take=take) for take in {*takes, 0}
            }
            for spec in specs:
                axis = spec.axes.index("T")
                parts = [
                    every[take][group.name][spec.name].narrow(axis, at, 1)
                    for at, take in zip(positions, takes, strict=True)
                ]
                empty = every[0][group.name][spec.name].narrow(axis, first, 0)
                kv[group.name][spec.name] = torch.cat(_as_bits([empty, *parts]), dim=axis).view(empty.dtype)
        return kv


def _as_bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as integers: not every dtype can be concatenated, and NaNs must stay as they are."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [tensor.contiguous().view(integers[tensor.dtype.itemsize]) for tensor in tensors]

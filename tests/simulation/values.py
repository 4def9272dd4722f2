"""Blobs that say which put they came from, in every word of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

WORD = 8
TORN = -1  # what `number_of` says of a blob that is not one put's


@dataclass(frozen=True)
class Kind:
    """What the blobs of one key look like."""

    name: str  # bytes, tensor, mapping
    words: int

    def make(self, number: int, size_factor: int = 1) -> Source:
        """Return a blob for put `number` in memory that can be scribbled over."""
        words = self.words * (size_factor if self.name == "bytes" else 1)
        memory = bytearray(struct.pack("<Q", number) * words)
        if self.name == "bytes":
            return Source(memoryview(memory), memory)
        tensor = torch.frombuffer(memory, dtype=torch.int64)
        if self.name == "tensor":
            return Source(tensor, memory)
        half = words // 2
        return Source({"a": tensor[:half], "b": tensor[half:].view(2, -1)}, memory)

    def number_of(self, blob) -> int:
        """Return the number of the put that a blob came from, or TORN."""
        if self.name == "bytes":
            if type(blob) is not bytes or not blob or len(blob) % (self.words * WORD):
                return TORN
            return struct.unpack_from("<Q", blob)[0] if blob == blob[:WORD] * (len(blob) // WORD) else TORN
        if self.name == "tensor":
            return _number_in(blob, (self.words,))
        if not isinstance(blob, dict) or list(blob) != ["a", "b"]:
            return TORN
        half = self.words // 2
        first, second = _number_in(blob["a"], (half,)), _number_in(blob["b"], (2, half // 2))
        return first if first == second else TORN


@dataclass(frozen=True)
class Source:
    blob: object
    memory: bytearray

    def scribble(self, pattern: int = 0xEE) -> None:
        """Do what a caller may do as soon as a call returned."""
        self.memory[:] = bytes([pattern]) * len(self.memory)

    def is_scribbled(self, pattern: int = 0xEE) -> bool:
        return self.memory.count(pattern) == len(self.memory)


def _number_in(tensor, shape: tuple[int, ...]) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
        return TORN
    number = int(tensor.flatten()[0])
    return number if bool((tensor == number).all()) else TORN


KINDS = (Kind("bytes", 100), Kind("bytes", 300), Kind("tensor", 256), Kind("mapping", 256), Kind("tensor", 1024))

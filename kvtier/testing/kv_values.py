"""KV whose every element tells where it belongs, so that any mix-up of chunks, layers, heads or tokens shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.tensors import TORCH_DTYPES
from kvtier.keys import Prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.chunk.layout import KVLayout
    from kvtier.chunk.segments import SegmentSpec

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens in parts, each under a salt: what `Prefix(...).extend(...)` is made of, in plain values."""

    parts: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(token for tokens, _ in self.parts for token in tokens)

    def prefix(self) -> Prefix:
        """Return it as the store takes it."""
        (tokens, salt), *rest = self.parts
        prefix = Prefix(tokens, salt=salt)
        for more, own in rest:
            prefix = prefix.extend(more, salt=own)
        return prefix

    def salt_at(self, position: int) -> str:
        """Return the salt of the part that holds a position; a part without one goes on with the last."""
        salt, end = "", 0
        for tokens, own in self.parts:
            salt, end = own or salt, end + len(tokens)
            if position < end:
                break
        return salt

    def identity(self, stop: int, chunk_tokens: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return what the tokens up to `stop` are keyed by: themselves, and the salt at the end of each chunk."""
        ends = [*range(chunk_tokens, stop + 1, chunk_tokens)]
        ends += [stop] if stop % chunk_tokens else []
        return self.tokens[:stop], tuple(self.salt_at(end - 1) for end in ends)


def kv_of(
    layout: KVLayout, prompt: Prompt, *, chunk_tokens: int, first: int = 0, stop: int | None = None, take: int = 0
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the KV of positions [first, stop) in the long form.

    Each element depends on group, tensor, layer, head, dimension, position, all tokens up to its chunk's end with
    their salts, and `take`, which tells two computations of one prompt apart.
    """
    stop = len(prompt.tokens) if stop is None else stop
    marks = _marks(prompt, chunk_tokens, take)[first:stop]
    return {
        group.name: {
            spec.name: _filled(spec, marks, f"{group.name}/{spec.name}")
            for spec in layout.specs(group.name, tokens=stop - first, first_token=first)
        }
        for group in layout.groups
    }


@lru_cache(maxsize=4096)
def _marks(prompt: Prompt, chunk_tokens: int, take: int) -> tuple[int, ...]:
    """Return one number per position that stands for everything up to it."""
    marks = []
    for position in range(len(prompt.tokens)):
        tokens, salts = prompt.identity(position + 1, chunk_tokens)
        end_of_chunk = min((position // chunk_tokens + 1) * chunk_tokens, len(prompt.tokens))
        salt = prompt.salt_at(end_of_chunk - 1)
        text = repr((tokens, salts[:-1], salt, take)).encode()
        marks.append(int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True))
    return tuple(marks)


def _filled(spec: SegmentSpec, marks: Sequence[int], name: str) -> torch.Tensor:
    bits = torch.zeros(spec.shape, dtype=torch.int64)
    named = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
    for axis, (letter, length) in enumerate(zip(spec.axes, spec.shape, strict=True)):
        values = torch.tensor(marks if letter == "T" else range(1, length + 1), dtype=torch.int64)
        shape = [1] * len(spec.shape)
        shape[axis] = length
        bits = _mixed(bits + (values * _wrapped(_ODD[axis])).view(shape))
    bits = _mixed(bits ^ named)
    dtype = TORCH_DTYPES[spec.dtype]
    return bits.to(_INTEGERS[dtype.itemsize]).view(dtype)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ (bits >> 29)) * _wrapped(_ODD[1])
    return bits ^ (bits >> 32)


def _wrapped(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have one dtype and shape, and the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    integers = _INTEGERS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


def assert_same_kv(found: object, wanted: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Fail unless `found` is `wanted`, names, shapes, dtypes and bits; one group may come in the short form."""
    assert isinstance(found, dict), type(found)
    if len(wanted) == 1 and set(found) != set(wanted):
        found = {next(iter(wanted)): found}
    assert set(found) == set(wanted), f"groups {sorted(found)}, not {sorted(wanted)}"
    for group, tensors in wanted.items():
        assert set(found[group]) == set(tensors), f"group {group!r} has {sorted(found[group])}"
        for name, tensor in tensors.items():
            got = found[group][name]
            where = f"{group}.{name}"
            assert got.shape == tensor.shape, f"{where} is {tuple(got.shape)}, not {tuple(tensor.shape)}"
            assert got.dtype == tensor.dtype, f"{where} is {got.dtype}"
            assert same_bits(got, tensor), f"{where} holds other values than were put"

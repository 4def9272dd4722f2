"""Codecs one after the other: the form a tier stores, and the steps between two tiers' forms."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kvtier.chunk.header import MAX_CHAIN, CodecRef
from kvtier.chunk.memory import copy_bytes
from kvtier.codecs.base import TensorCodec
from kvtier.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvtier.chunk.segments import SegmentSpec
    from kvtier.codecs.base import Codec

_LENGTH = struct.Struct("<Q")


class Scratch:
    """Two reusable buffers for what lies between the steps of a chain; one `Scratch` per thread."""

    def __init__(self) -> None:
        self._buffers = [bytearray(), bytearray()]

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(map(len, self._buffers))

    def take(self, which: int, size: int) -> memoryview:
        """Return `size` bytes of buffer 0 or 1; what an earlier call returned for it is given up by this call."""
        if len(self._buffers[which]) < size:
            self._buffers[which] = bytearray(size)
        return memoryview(self._buffers[which])[:size]

    def shrink(self) -> None:
        """Give the buffers back."""
        self._buffers = [bytearray(), bytearray()]


class CodecChain:
    """Codecs applied in order to one segment. Immutable and safe in any thread, given a scratch per thread.

    The stored form is the last codec's output, followed by the length of each earlier codec's output (u64,
    little-endian), so that a reader knows every size without decoding. `done` counts steps that `source` has been
    through already: a chain from `missing_after` takes the upper tier's stored form, not the raw value.
    An empty segment is stored as no bytes, whatever the codecs.
    """

    def __init__(self, codecs: Sequence[Codec] = (), *, done: int = 0) -> None:
        self._codecs = tuple(codec for codec in codecs if codec.name != "raw")
        self._done = done
        if len(self._codecs) + done > MAX_CHAIN:
            raise ConfigError(f"{len(self._codecs) + done} codecs in one chain; at most {MAX_CHAIN} are possible")
        self.refs: tuple[CodecRef, ...] = tuple(
            CodecRef(name=codec.name, options=dict(codec.options())) for codec in self._codecs
        )
        self.lossy: bool = any(codec.lossy for codec in self._codecs)

    def __repr__(self) -> str:
        return f"CodecChain({'+'.join(ref.name for ref in self.refs) or 'raw'})"

    def __len__(self) -> int:
        return len(self._codecs)

    def bound(self, size: int, spec: SegmentSpec) -> int:
        """Return the most bytes that `encode` writes for `size` source bytes."""
        if not size or not self._codecs:
            return size
        size -= _LENGTH.size * self._lengths_before
        for codec in self._codecs:
            size = codec.bound(size, spec)
        return size + _LENGTH.size * self._lengths_after

    @property
    def _lengths_before(self) -> int:
        return max(self._done - 1, 0)

    @property
    def _lengths_after(self) -> int:
        return max(self._done + len(self._codecs) - 1, 0)

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec, scratch: Scratch) -> int:
        """Write the stored form of `source` to the front of `into`, which has `bound` bytes; return its length.

        Raises:
            CodecError: a codec refused the value, or `source` is not the stored form this chain continues.
        """
        if not self._codecs or not len(source):
            copy_bytes(source, into[: len(source)])
            return len(source)
        body, lengths = _split(source, self._lengths_before)
        if self._done:
            lengths.append(len(body))
        return self._encode_rest(body, self._codecs, lengths, into, spec=spec, scratch=scratch)

    def _encode_rest(
        self,
        body: memoryview,
        codecs: Sequence[Codec],
        lengths: list[int],
        into: memoryview,
        *,
        spec: SegmentSpec,
        scratch: Scratch,
    ) -> int:
        for index, codec in enumerate(codecs[:-1], start=len(self._codecs) - len(codecs)):
            between = scratch.take(index % 2, codec.bound(len(body), spec))
            body = between[: codec.encode(body, between, spec)]
            lengths.append(len(body))
        room = len(into) - _LENGTH.size * len(lengths)
        end = codecs[-1].encode(body, into[:room], spec)
        for length in lengths:
            _LENGTH.pack_into(into, end, length)
            end += _LENGTH.size
        return end

    @property
    def takes_tensors(self) -> bool:
        """Whether there are `encode_tensor` and `decode_tensor`: the first codec works on tensors where they lie."""
        return not self._done and bool(self._codecs) and isinstance(self._codecs[0], TensorCodec)

    def encode_tensor(self, source: torch.Tensor, into: memoryview, spec: SegmentSpec, scratch: Scratch) -> int:
        """Do as `encode` for the dense elements of a host tensor of any strides, without laying them out first.

        Raises:
            CodecError: a codec refused the value.
        """
        first = self._first_of_tensors()
        if not source.nbytes:
            return 0
        if len(self._codecs) == 1:
            return first.encode_tensor(source, into, spec)
        between = scratch.take(0, first.bound(source.nbytes, spec))
        body = between[: first.encode_tensor(source, between, spec)]
        return self._encode_rest(body, self._codecs[1:], [len(body)], into, spec=spec, scratch=scratch)

    def decode_tensor(self, source: memoryview, into: torch.Tensor, spec: SegmentSpec, scratch: Scratch) -> None:
        """Do as `decode` into a host tensor of any strides.

        Raises:
            CodecError: `source` does not decode to a tensor like this.
        """
        first = self._first_of_tensors()
        if not into.nbytes:
            self.decode(source, memoryview(bytearray()), spec, scratch)
            return
        body, between = _split(source, self._lengths_after)
        self._check(into.nbytes, between, spec)
        first.decode_tensor(self._decode_to_first(body, between, spec, scratch), into, spec)

    def _first_of_tensors(self) -> TensorCodec:
        first = self._codecs[0] if self._codecs and not self._done else None
        if not isinstance(first, TensorCodec):
            raise CodecError(f"{self!r} does not begin with a codec that takes tensors")
        return first

    def _decode_to_first(
        self, body: memoryview, between: Sequence[int], spec: SegmentSpec, scratch: Scratch
    ) -> memoryview:
        """Undo all steps but the first."""
        for index in range(len(self._codecs) - 1, 0, -1):
            step = scratch.take(index % 2, between[index - 1])
            self._codecs[index].decode(body, step, spec)
            body = step
        return body

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec, scratch: Scratch) -> None:
        """Undo `encode`: fill `into` (as long as `decoded_size` says) exactly.

        Raises:
            CodecError: `source` does not decode to exactly `len(into)` bytes.
        """
        if not len(into) or not self._codecs:
            if len(source) != len(into):
                raise CodecError(f"{len(source)} stored bytes for a value of {len(into)}")
            copy_bytes(source, into)
            return
        body, lengths = _split(source, self._lengths_after)
        kept = self._lengths_before
        size = len(into) - _LENGTH.size * kept
        if size <= 0 or (self._done and lengths[kept] != size):
            raise CodecError(f"the stored form does not decode to {len(into)} bytes")
        target, between = into[:size], lengths[self._done :]
        self._check(size, between, spec)
        self._codecs[0].decode(self._decode_to_first(body, between, spec, scratch), target, spec)
        for index, length in enumerate(lengths[:kept]):
            _LENGTH.pack_into(into, size + index * _LENGTH.size, length)

    def _check(self, size: int, between: Sequence[int], spec: SegmentSpec) -> None:
        """Refuse declared lengths that no encoder could have made: they drive allocation."""
        for codec, length in zip(self._codecs, between, strict=False):
            if not 0 < length <= codec.bound(size, spec):
                raise CodecError(f"{codec.name}: {length} bytes cannot come from {size}")
            size = length

    def decoded_size(self, source: memoryview) -> int:
        """Return the bytes `decode` will fill, for a chain that continues another one's stored form.

        The number comes from stored bytes: compare it with a cap before allocating.

        Raises:
            CodecError: too short to be a stored form.
        """
        if not self._done:
            raise CodecError("a whole chain decodes to the segment's raw size, which the header tells")
        if not self._codecs or not len(source):
            return len(source)
        _, lengths = _split(source, self._lengths_after)
        return lengths[self._done - 1] + _LENGTH.size * self._lengths_before

    def extends(self, other: CodecChain) -> bool:
        """Tell whether this chain begins with all of `other`'s steps, options included."""
        return self._begins(other.refs)

    def _begins(self, refs: Sequence[CodecRef]) -> bool:
        return self.refs[: len(refs)] == tuple(refs)

    def missing_after(self, refs: Sequence[CodecRef]) -> CodecChain:
        """Return the steps that lead from the stored form under `refs` to this chain's.

        Raises:
            CodecError: this chain does not begin with `refs`.
        """
        if not self._begins(refs):
            raise CodecError(f"{self!r} does not begin with {'+'.join(ref.name for ref in refs) or 'raw'}")
        return CodecChain(self._codecs[len(refs) :], done=self._done + len(refs))


def _split(source: memoryview, count: int) -> tuple[memoryview, list[int]]:
    """Return the body and the `count` lengths behind it."""
    end = len(source) - count * _LENGTH.size
    if end <= 0:
        raise CodecError(f"{len(source)} bytes are too short for a chain's stored form")
    return source[:end], [_LENGTH.unpack_from(source, end + i * _LENGTH.size)[0] for i in range(count)]


def chain_from_refs(refs: Sequence[CodecRef], load: Callable[[str], type[Codec]]) -> CodecChain:
    """Build the chain an entry names; `load` is the registry's and knows a closed set of names.

    Raises:
        CodecError: an option that the codec does not take.
        UnknownPluginError: from `load`.
    """
    codecs = []
    for ref in refs:
        codec_class = load(ref.name)
        try:
            codecs.append(codec_class(**ref.options))
        except (TypeError, ValueError) as exc:
            raise CodecError(f"codec {ref.name!r} does not take {dict(ref.options)!r}: {exc}") from exc
    return CodecChain(codecs)

"""What every codec must do, as tests: subclass `CodecConformance`, say how to make the codec, done."""

from __future__ import annotations

import random
import re
import threading
import tracemalloc
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pytest

from kvtier.chunk.container import Header, payload_offset, payload_size, plan_segments, seal, segment_view, verify
from kvtier.chunk.header import MAX_OPTIONS, MAX_WORD
from kvtier.codecs.base import Codec
from kvtier.codecs.chain import CodecChain, Scratch, chain_from_refs
from kvtier.errors import CodecError
from kvtier.testing.codec_corpus import Sample, kv_sample, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.chunk.segments import SegmentSpec

_GUARD = 64
_PAINT = 0x5A
_SPARE = 4 << 20  # bytes a decoder may use beside its target: tables, contexts
_THREADS = 4
_JOIN_SECONDS = 60.0


class CodecConformance(ABC):
    """Tests of the `Codec` contract; pytest collects them from a subclass whose name starts with `Test`.

    A subclass overrides `make_codec`; a lossy one also `assert_close`; one that takes only some values `supports`; one
    that reads sizes from stored bytes `hostile`. Give options that are not the defaults: forgotten ones show then.
    """

    @abstractmethod
    def make_codec(self) -> Codec:
        """Return a new codec, equal to any other that this method returns."""

    def supports(self, spec: SegmentSpec) -> bool:
        """Tell whether the codec takes values like `spec`; for others `encode` must raise `CodecError`."""
        return True

    def assert_close(self, sample: Sample, decoded: bytes) -> None:
        """Assert that a lossy codec kept its promise; `sample.finite` tells if it made one for this value."""
        raise NotImplementedError(f"a lossy codec says how close {sample.title} is: override assert_close")

    def hostile(self) -> Sequence[tuple[bytes, int]]:
        """Return stored bytes that lie about sizes, each with the length of the target to decode into."""
        return ()

    # What a codec says of itself

    def test_name_and_options_can_be_stored(self) -> None:
        codec = self.make_codec()
        assert isinstance(codec, Codec)
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,31}", codec.name), "a name is 1-32 of a-z, 0-9, '.', '_', '-'"
        options = codec.options()
        assert len(options) <= MAX_OPTIONS
        for name, value in options.items():
            assert name.isidentifier(), f"option {name!r} cannot be passed by keyword"
            assert type(value) in {str, int, float, bool}, f"option {name} is a {type(value).__name__}"
            assert len(str(value)) <= MAX_WORD, f"option {name} is too long for a header"

    def test_options_rebuild_the_codec(self) -> None:
        codec = self.make_codec()
        rebuilt = type(codec)(**codec.options())
        assert rebuilt.options() == codec.options()
        for sample in self._samples():
            stored = _encode(codec, sample)
            assert _encode(rebuilt, sample) == stored, (
                f"{sample.title}: rebuilt from its options, it stores other bytes"
            )
            assert _decode(rebuilt, stored, sample) == _decode(codec, stored, sample), sample.title

    # Values

    def test_round_trip(self) -> None:
        codec = self.make_codec()
        for sample in self._samples():
            decoded = _decode(codec, _encode(codec, sample), sample)
            if codec.lossy:
                self.assert_close(sample, decoded)
            else:
                assert decoded == sample.raw, f"{sample.title}: decodes to other bytes"

    def test_refuses_what_it_does_not_support(self) -> None:
        codec = self.make_codec()
        for sample in samples():
            if not self.supports(sample.spec):
                with pytest.raises(CodecError):
                    _encode(codec, sample)

    def test_same_bytes_give_the_same_bytes(self) -> None:
        codec, other = self.make_codec(), self.make_codec()
        for sample in self._samples():
            stored = _encode(codec, sample)
            assert _encode(codec, sample, paint=0xA5) == stored, f"{sample.title}: depends on what the target held"
            assert _encode(codec, sample, spare=4096) == stored, f"{sample.title}: depends on the target's size"
            assert _encode(other, sample) == stored, f"{sample.title}: depends on the codec's past"

    def test_works_in_a_chain_and_a_container(self) -> None:
        codec = self.make_codec()
        sample = next(sample for sample in self._samples() if sample.spec.axes)
        chain, scratch = CodecChain([codec]), Scratch()
        stored = bytearray(chain.bound(len(sample.raw), sample.spec))
        size = chain.encode(memoryview(sample.raw), memoryview(stored), sample.spec, scratch)
        segments = plan_segments([sample.spec], [size])
        offset = payload_offset([sample.spec], "key")
        view = memoryview(bytearray(offset + payload_size(segments)))
        view[offset : offset + size] = memoryview(stored)[:size]
        header = Header(key="key", namespace="n", kind="kv", chain=chain.refs, segments=segments, created=1.0)
        seal(view, header, payload_offset=offset, size=len(view))
        found = verify(view, key="key", namespace="n", codecs={codec.name}, max_raw=len(sample.raw))
        again = chain_from_refs(found.chain, {codec.name: type(codec)}.__getitem__)
        decoded = memoryview(bytearray(len(sample.raw)))
        again.decode(segment_view(view, found, found.segments[0]), decoded, sample.spec, scratch)
        assert decoded == _decode(codec, bytes(stored[:size]), sample)

    # Buffers

    def test_keeps_to_the_bound_and_to_its_buffers(self) -> None:
        codec = self.make_codec()
        for sample in self._samples():
            bound = codec.bound(len(sample.raw), sample.spec)
            stored, guards = _guarded(bound)
            size = codec.encode(memoryview(sample.raw), stored, sample.spec)
            assert 0 < size <= bound, f"{sample.title}: {size} bytes stored, the bound is {bound}"
            assert guards(), f"{sample.title}: encode wrote outside its target"
            decoded, guards = _guarded(len(sample.raw))
            codec.decode(stored[:size], decoded, sample.spec)
            assert guards(), f"{sample.title}: decode wrote outside its target"

    def test_leaves_the_source_alone(self) -> None:
        codec = self.make_codec()
        for sample in self._samples():
            source = bytearray(sample.raw)
            stored = bytearray(codec.bound(len(source), sample.spec))
            size = codec.encode(memoryview(source), memoryview(stored), sample.spec)
            assert source == sample.raw, f"{sample.title}: encode changed its source"
            before = stored[:size]
            codec.decode(memoryview(stored)[:size], memoryview(source), sample.spec)
            assert stored[:size] == before, f"{sample.title}: decode changed its source"

    def test_keeps_no_buffer(self) -> None:
        codec = self.make_codec()
        sample = next(self._samples())
        raw, stored = bytearray(sample.raw), bytearray(codec.bound(len(sample.raw), sample.spec))
        with memoryview(raw) as source, memoryview(stored) as into:
            size = codec.encode(source, into, sample.spec)
            with into[:size] as whole, into[: size - 1] as short:
                codec.decode(whole, source, sample.spec)
                with pytest.raises(CodecError):
                    codec.decode(short, source, sample.spec)
        for memory in (raw, stored):
            try:
                memory.append(0)  # fails while a view of it is alive
            except BufferError:
                pytest.fail("the codec still holds a buffer after the call ended")

    # Stored bytes are not trusted

    def test_refuses_missing_and_surplus_bytes(self) -> None:
        codec = self.make_codec()
        for sample in self._samples():
            stored = _encode(codec, sample)
            cuts = {0, 1, len(stored) // 2, len(stored) - 2, len(stored) - 1} & set(range(len(stored)))
            wrong = [stored[:cut] for cut in sorted(cuts)]
            wrong += [stored + b"\x00", stored + b"junk", stored + stored]
            for item in wrong:
                assert not _decodes(codec, item, sample), f"{sample.title}: {len(item)} bytes pass for {len(stored)}"

    def test_refuses_a_target_of_another_size(self) -> None:
        codec = self.make_codec()
        for sample in self._samples():
            stored = _encode(codec, sample)
            for size in {len(sample.raw) - 1, len(sample.raw) + 1, 2 * len(sample.raw)} - {0}:
                with pytest.raises(CodecError):
                    codec.decode(memoryview(stored), memoryview(bytearray(size)), sample.spec)

    def test_damage_raises_codec_error_or_nothing(self) -> None:
        codec = self.make_codec()
        chance = random.Random(5)
        for sample in self._samples():
            stored = _encode(codec, sample)
            bits = 8 * len(stored)
            chosen = set(range(min(bits, 160))) | set(range(max(bits - 80, 0), bits))
            chosen |= {chance.randrange(bits) for _ in range(40)}
            for bit in sorted(chosen) if len(sample.raw) <= 1 << 14 else sorted(chosen)[::8]:
                damaged = bytearray(stored)
                damaged[bit // 8] ^= 1 << bit % 8
                self._decode_hostile(codec, bytes(damaged), len(sample.raw), sample)

    def test_garbage_raises_codec_error_or_nothing(self) -> None:
        codec = self.make_codec()
        chance = random.Random(6)
        sample = next(self._samples())
        for _ in range(300):
            self._decode_hostile(codec, chance.randbytes(chance.randrange(200)), len(sample.raw), sample)

    def test_allocates_no_more_than_the_target(self) -> None:
        codec = self.make_codec()
        sample = next(self._samples())
        stored = _encode(codec, sample)
        lies = [(bytearray(stored), len(sample.raw)) for _ in range(16 * 8)]
        for bit, (lie, _) in enumerate(lies):  # sizes stand near the front, if anywhere
            if bit // 8 < len(lie):
                lie[bit // 8] ^= 1 << bit % 8
        for item, size in [*lies, *self.hostile()]:
            tracemalloc.start()
            try:
                self._decode_hostile(codec, bytes(item), size, sample)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak <= 3 * (size + len(item)) + _SPARE, f"{peak} bytes allocated to decode {size}"

    def test_hostile_bytes_are_refused(self) -> None:
        codec = self.make_codec()
        sample = next(self._samples())
        for item, size in self.hostile():
            with pytest.raises(CodecError):
                codec.decode(memoryview(item), memoryview(bytearray(size)), sample.spec)

    # Threads

    def test_threads_do_not_disturb_each_other(self) -> None:
        codec = self.make_codec()
        work = [
            [sample for i in range(4) if self.supports((sample := kv_sample(10 * seed + i, tokens=8 * (i + 1))).spec)]
            for seed in range(_THREADS)
        ]
        expected = [[(_encode(codec, sample)) for sample in batch] for batch in work]
        start, wrong = threading.Barrier(_THREADS), []

        def run(index: int) -> None:
            try:
                start.wait(_JOIN_SECONDS)
                for _ in range(8):
                    for sample, stored in zip(work[index], expected[index], strict=True):
                        assert _encode(codec, sample) == stored
                        assert codec.lossy or _decode(codec, stored, sample) == sample.raw
            except BaseException as exc:  # noqa: BLE001  # carried to the test's own thread
                wrong.append(exc)

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "threads hang in the codec"
        assert not wrong, f"two threads in one codec: {wrong[0]!r}"

    def _samples(self) -> Iterator[Sample]:
        return (sample for sample in samples() if self.supports(sample.spec))

    def _decode_hostile(self, codec: Codec, stored: bytes, size: int, sample: Sample) -> None:
        decoded, guards = _guarded(size)
        try:
            codec.decode(memoryview(stored), decoded, sample.spec)
        except CodecError:
            pass
        except Exception as exc:  # noqa: BLE001  # the very thing that is looked for
            pytest.fail(f"{sample.title}, damaged: {exc!r} instead of CodecError")
        assert guards(), f"{sample.title}, damaged: decode wrote outside its target"


def _encode(codec: Codec, sample: Sample, *, paint: int = _PAINT, spare: int = 0) -> bytes:
    into = bytearray([paint]) * (codec.bound(len(sample.raw), sample.spec) + spare)
    return bytes(into[: codec.encode(memoryview(sample.raw), memoryview(into), sample.spec)])


def _decode(codec: Codec, stored: bytes, sample: Sample) -> bytes:
    into = bytearray([_PAINT]) * len(sample.raw)
    codec.decode(memoryview(stored), memoryview(into), sample.spec)
    return bytes(into)


def _decodes(codec: Codec, stored: bytes, sample: Sample) -> bool:
    try:
        _decode(codec, stored, sample)
    except CodecError:
        return False
    return True


def _guarded(size: int) -> tuple[memoryview, Callable[[], bool]]:
    """Return a painted buffer, and a function that tells whether the bytes around it are still paint."""
    memory = bytearray([_PAINT]) * (size + 2 * _GUARD)
    guard = bytes([_PAINT]) * _GUARD
    return memoryview(memory)[_GUARD : _GUARD + size], lambda: memory[:_GUARD] == guard == memory[_GUARD + size :]

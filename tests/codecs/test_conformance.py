"""The built-in codecs against the kit that third parties use."""

import zstandard

from kvtier.codecs.bf16_split import Bf16SplitCodec
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.int4 import Int4Codec, K5V4Codec
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.zstd import ZstdCodec
from kvtier.testing.codecs import CodecConformance
from tests.codecs.closeness import assert_within, tensor_of


class TestRaw(CodecConformance):
    def make_codec(self):
        return RawCodec()


class TestZstd(CodecConformance):
    def make_codec(self):
        return ZstdCodec(level=3)

    def hostile(self):
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))  # 128 MiB in a few KiB
        frame = bytearray(zstandard.ZstdCompressor().compress(b"kvtier" * 1000))
        unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096))
        skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00junk"
        return [
            (bomb, 4096),
            (bomb, len(bomb)),
            (_declaring(frame, 1 << 34), 6000),
            (_declaring(frame, 1 << 62), 6000),
            (unsized, 4096),
            (skippable, 4),
            (skippable + bytes(frame), 6000),
            (bytes(frame) + skippable, 6000),
            (bytes(frame[: len(frame) // 2]), 6000),
        ]


def _declaring(frame, size):
    """The same frame with an eight-byte content size: what the library alone would allocate."""
    parameters = zstandard.get_frame_parameters(bytes(frame))
    assert parameters.content_size == 6000
    header = zstandard.frame_header_size(bytes(frame))
    return bytes(frame[:4]) + bytes([0b1110_0000]) + size.to_bytes(8, "little") + bytes(frame[header:])


class Quantising(CodecConformance):
    def assert_close(self, sample, decoded):
        codec = self.make_codec()
        if sample.spec.dtype == "bytes" or codec.plan(sample.spec) is None:
            assert decoded == sample.raw
            return
        assert_within(codec, sample.spec, tensor_of(sample.raw, sample.spec), tensor_of(decoded, sample.spec))

    def hostile(self):
        return [(b"Q\x01" + bytes(62), 16), (b"E\x01" + bytes(6) + b"\x01" + bytes(55), 16), (bytes(64), 1), (b"", 1)]


class TestInt8(Quantising):
    def make_codec(self):
        return Int8Codec(group=32, sinks=2)


class TestInt4(Quantising):
    def make_codec(self):
        return Int4Codec(group=32, sinks=2)


class TestK5V4(Quantising):
    def make_codec(self):
        return K5V4Codec(group=48, sinks=1)


class TestFp8(Quantising):
    def make_codec(self):
        return Fp8Codec(group=32, sinks=2)


class TestBf16Split(CodecConformance):
    def make_codec(self):
        return Bf16SplitCodec(level=2)

    def hostile(self):
        return [
            (b"S\x01" + bytes(14), 16),
            (b"S\x01" + bytes(14) + b"\xff\xff\xff\xff" + bytes(99), 16),
            (b"", 1),
            (bytes(16), 1),
        ]

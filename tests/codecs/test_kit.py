"""The kit itself: a sound codec passes all of it, every broken twin fails the test that is meant for it."""

import pytest

from kvtier.errors import CodecError
from kvtier.testing.broken_codecs import BROKEN, SoundCodec
from kvtier.testing.codecs import CodecConformance

LEVEL = 6


class TestSound(CodecConformance):
    def make_codec(self):
        return SoundCodec(level=LEVEL)

    def hostile(self):
        return [((1 << 40).to_bytes(8, "little") + b"x", 16), (b"", 1)]


class Halved(SoundCodec):
    """A lossy codec with a promise that its test checks."""

    lossy = True

    def encode(self, source, into, spec):
        return super().encode(memoryview(bytes(b & 0xFE for b in source)), into, spec)


class TestLossy(CodecConformance):
    def make_codec(self):
        return Halved()

    def assert_close(self, sample, decoded):
        assert all(0 <= a - b <= 1 for a, b in zip(sample.raw, decoded, strict=True))


class OnlyHalfPrecision(SoundCodec):
    def encode(self, source, into, spec):
        if spec.dtype != "bfloat16":
            raise CodecError("bfloat16 only")
        return super().encode(source, into, spec)


class TestChoosy(CodecConformance):
    def make_codec(self):
        return OnlyHalfPrecision()

    def supports(self, spec):
        return spec.dtype == "bfloat16"


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", value))
def test_catches(broken, test):
    class Subject(CodecConformance):
        def make_codec(self):
            return broken(level=LEVEL)

    with pytest.raises(BaseException) as caught:  # noqa: PT011  # pytest's own failures are no Exceptions
        getattr(Subject(), test)()
    assert not isinstance(caught.value, KeyboardInterrupt | SystemExit | NotImplementedError)


def test_every_test_of_the_kit_can_fail():
    tests = {name for name in dir(CodecConformance) if name.startswith("test_")}
    others = {
        "test_garbage_raises_codec_error_or_nothing",  # as for damage
        "test_hostile_bytes_are_refused",  # depends on what the subclass names
        "test_refuses_what_it_does_not_support",  # likewise
        "test_works_in_a_chain_and_a_container",  # the parts together; each has tests of its own
    }
    assert tests - others <= set(BROKEN.values())


def test_a_lossy_codec_must_say_how_close_it_is():
    class Subject(CodecConformance):
        def make_codec(self):
            return Halved()

    with pytest.raises(NotImplementedError, match="assert_close"):
        Subject().test_round_trip()

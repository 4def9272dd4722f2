"""How fast a tier is now: a running estimate of latency and bandwidth from the reads that it serves."""

from __future__ import annotations

from typing import Final

from kvtier.planner import Link

_KEPT: Final = 0.8  # of the weight of earlier samples, at each new one
_LEVEL_KEPT: Final = 0.5
_FEW: Final = 4  # samples that are taken as they come, before any is held against the others
_CHANGED: Final = 1.4  # times slower or faster than expected: an odd sample, or, twice running, another speed
_LONGEST_SECONDS: Final = 0.5  # of one sample; many reads that overlap for longer are cut into several
_MANY: Final = 16  # times as many reads must have ended as are under way: what those have done so far is not known
_TELLING: Final = 1e-3  # how different sizes must be to tell latency from bandwidth
_SEED_SIZES: Final = (4096, 8 << 20)
_CORRECTION_KEPT: Final = 0.7
_MOST_STEP: Final = 2.0  # what one get may differ from the correction so far: no hiccup shall stand for long
_LEAST_CORRECTION: Final = 0.1
_MOST_CORRECTION: Final = 10.0
_LEAST_PER_BYTE: Final = 1e-13  # seconds


class LinkEstimate:
    """Reads that overlap are one sample: their bytes, and the time from the first one's start to the last one's end.

    That is what a caller waits for who asks for many chunks at once. Latency and bandwidth are fitted to the samples
    of the last while (least squares of relative errors, older ones fade), which costs a few additions per sample and
    nothing per chunk but a count. A level that both are scaled by follows a line that becomes slower or faster within
    two samples: fitted alone, small old samples and large new ones would pass for another latency. One odd sample
    changes nothing. `correct` learns what else a caller waits for: decoding, copying, a busy machine.
    """

    __slots__ = (
        "_bytes",
        "_correction",
        "_cut",
        "_ended",
        "_latency",
        "_level",
        "_odd",
        "_samples",
        "_since",
        "_sums",
        "_under_way",
        "sampled",
    )

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weights; times size; times size squared; times seconds; times size and seconds
        self._latency = 0.0
        self._correction = 1.0
        self._level = 1.0
        self._samples = 0
        self._odd: tuple[int, float] | None = None  # the latest sample, if far off: its size and seconds
        self._under_way = 0
        self._begin(0.0, cut=False)
        self.sampled: float | None = None  # when the latest sample came, in monotonic seconds

    def seed(self, link: Link) -> None:
        """Begin with what was measured elsewhere; a few samples replace it."""
        self._latency = link.latency_seconds
        for size in _SEED_SIZES:
            self._add(size, link.seconds(size))

    def began(self, now: float) -> None:
        """Count a read that begins; `ended` must follow."""
        if not self._under_way:
            self._begin(now, cut=False)
        self._under_way += 1

    def ended(self, size: int, now: float) -> None:
        """Count the end of a read that gave `size` bytes, 0 if it gave none."""
        self._under_way -= 1
        self._ended += 1
        self._bytes += size
        long = now - self._since >= _LONGEST_SECONDS
        if not self._under_way:
            if long or not self._cut:  # a short rest behind a cut began before it
                self.note(self._bytes, now - self._since, now)
        elif long and self._ended >= _MANY * self._under_way:
            self.note(self._bytes, now - self._since, now)
            self._begin(now, cut=True)

    def _begin(self, now: float, *, cut: bool) -> None:
        self._since, self._bytes, self._ended, self._cut = now, 0, 0, cut

    def note(self, size: int, seconds: float, now: float) -> None:
        """Take a sample."""
        if size <= 0 or seconds <= 0:
            return
        self.sampled = now
        known, odd, self._odd = self._fitted(), self._odd, None
        if known is not None and self._samples >= _FEW:
            level = seconds / known.seconds(size)
            slower = level > self._level
            if 1 / _CHANGED <= level / self._level <= _CHANGED:
                self._level += (1 - _LEVEL_KEPT) * (level - self._level)
            elif odd is None:
                self._odd = (size, seconds)
                return
            else:
                earlier = odd[1] / known.seconds(odd[0])
                if (earlier > self._level) == slower:  # another speed
                    self._level = (level + earlier) / 2
                else:  # another latency
                    self._sums, self._samples, self._level = [0.0] * 5, 0, 1.0
                self._fade_and_add(*odd)
        self._fade_and_add(size, seconds)

    def _fade_and_add(self, size: int, seconds: float) -> None:
        self._samples += 1
        self._sums = [kept * _KEPT for kept in self._sums]
        self._add(size, seconds / self._level)

    def _add(self, size: int, seconds: float) -> None:
        known = self._fitted()
        # In proportion to the time expected: in proportion to the time taken, slow samples would hardly count.
        weight = 1.0 / (known.seconds(size) if known is not None else seconds) ** 2
        for i, value in enumerate((1.0, size, size * size, seconds, size * seconds)):
            self._sums[i] += weight * value
        fitted = self._fitted()
        self._latency = fitted.latency_seconds if fitted is not None else 0.0

    def correct(self, size: int, seconds: float, now: float) -> None:
        """Learn from a whole call that this tier alone served: `size` bytes were there after `seconds`."""
        known = self._fitted()
        if known is None or not size or seconds <= 0:
            return
        self.sampled = now
        if self._odd is not None:
            return  # it would be held against the decoding
        ratio = seconds / (known.seconds(size) * self._level)
        ratio = min(max(ratio, self._correction / _MOST_STEP), self._correction * _MOST_STEP)
        ratio = min(max(ratio, _LEAST_CORRECTION), _MOST_CORRECTION)
        self._correction = _CORRECTION_KEPT * self._correction + (1 - _CORRECTION_KEPT) * ratio

    @property
    def link(self) -> Link | None:
        """What a caller may expect now; None before the first sample."""
        known = self._fitted()
        if known is None:
            return None
        scale = self._level * self._correction
        return Link(
            latency_seconds=known.latency_seconds * scale,
            bytes_per_second=known.bytes_per_second / scale,
        )

    def _fitted(self) -> Link | None:
        ones, x, xx, y, xy = self._sums
        if not ones:
            return None
        spread = ones * xx - x * x
        if spread > _TELLING * ones * xx:
            latency, per_byte = (y * xx - xy * x) / spread, (xy * ones - x * y) / spread
            if per_byte <= 0:
                latency, per_byte = y / ones, _LEAST_PER_BYTE
        else:  # all of about one size: the latency is what it was
            latency = self._latency
            per_byte = (xy - latency * x) / xx
        if latency < 0 or per_byte <= 0:
            latency, per_byte = 0.0, xy / xx
        return Link(latency_seconds=latency, bytes_per_second=1.0 / per_byte)

"""Load, recompute, or both ends at once: which makes the first token come soonest; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

Choice = Literal["load", "recompute", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast a tier gives what it has: seconds before the first byte of a request, then bytes per second."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, size: int) -> float:
        """Return the time to load `size` bytes; none for nothing."""
        return self.latency_seconds + size / self.bytes_per_second if size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A model of computing KV: `seconds(n)` tokens take `linear_seconds * n + quadratic_seconds * n * n`."""

    linear_seconds: float
    quadratic_seconds: float = 0.0

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float]]) -> Prefill:
        """Return the least-squares fit of relative errors to measured (tokens, seconds).

        Raises:
            InvalidValueError: fewer than two different lengths, or times that are not above 0.
        """
        if len({tokens for tokens, _ in measured}) < 2 or any(n < 1 or s <= 0 for n, s in measured):  # noqa: PLR2004
            raise InvalidValueError("prefill: give at least two lengths with times above 0")
        rows = [(n / s, n * n / s) for n, s in measured]  # relative errors: short and long prompts count alike
        aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
        spread = aa * bb - ab * ab
        linear, quadratic = (a * bb - b * ab) / spread, (b * aa - a * ab) / spread
        if quadratic < 0:  # noise: a straight line then
            linear, quadratic = a / aa, 0.0
        elif linear < 0:
            linear, quadratic = 0.0, b / bb
        return cls(linear_seconds=linear, quadratic_seconds=quadratic)

    @classmethod
    def from_speed(cls, tokens_per_second: float) -> Prefill:
        """Return the model of a prefill of one speed for all lengths.

        Raises:
            InvalidValueError: the speed is not above 0.
        """
        if not tokens_per_second > 0:
            raise InvalidValueError(f"tokens_per_second is {tokens_per_second!r}; write a number above 0")
        return cls(linear_seconds=1.0 / tokens_per_second)

    @classmethod
    def from_flops(cls, *, parameters: float, num_layers: int, hidden_size: int, flops_per_second: float) -> Prefill:
        """Return the model of a dense transformer: 2 operations per parameter and token, and attention.

        Args:
            parameters: that each token passes (of a mixture of experts, the active ones).
            num_layers: with attention to all tokens before.
            hidden_size: heads x head dimension.
            flops_per_second: what the device reaches in a prefill, not its nominal peak.

        Raises:
            InvalidValueError: one of them is not above 0.
        """
        if min(parameters, num_layers, hidden_size, flops_per_second) <= 0:
            raise InvalidValueError("prefill: parameters, layers, hidden size and flops_per_second must be above 0")
        return cls(
            linear_seconds=2.0 * parameters / flops_per_second,
            quadratic_seconds=2.0 * num_layers * hidden_size / flops_per_second,
        )

    def seconds(self, tokens: int, *, start: int = 0) -> float:
        """Return the time to compute `tokens` tokens behind `start` that are there already."""
        end = start + tokens
        return self.linear_seconds * tokens + self.quadratic_seconds * (end * end - start * start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive tokens that one tier holds; `tier` tells which stretches share a link."""

    tokens: int
    size: int  # bytes
    link: Link
    tier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to do, and the seconds that each way would take for the cached part of the prompt.

    Attributes:
        choice: `load` the leading `load_tokens` and compute the rest; `recompute` all; or `both`: compute the leading
            `compute_tokens` while the `load_tokens` behind them are loaded.
        load_tokens: how many of the cached tokens to load.
        compute_tokens: how many of them to compute; `load_tokens` and these are all that is cached.
        load_seconds: to load everything that is cached.
        recompute_seconds: to compute all of it.
        seconds: what the choice takes.
    """

    choice: Choice
    load_tokens: int
    compute_tokens: int
    load_seconds: float
    recompute_seconds: float
    seconds: float

    @property
    def benefit_seconds(self) -> float:
        """How much sooner the first token comes than by computing everything."""
        return self.recompute_seconds - self.seconds


NOTHING_CACHED: Final = LoadPlan(
    choice="recompute", load_tokens=0, compute_tokens=0, load_seconds=0.0, recompute_seconds=0.0, seconds=0.0
)


def plan_load(stretches: Sequence[Stretch], prefill: Prefill, *, start: int = 0, split: bool = False) -> LoadPlan:
    """Choose for a cached prefix, whose stretches come in order from position `start` (what is before is there).

    All that is loaded is asked for at once: tiers give it side by side, each one's stretches one after the other. To
    load a leading part and compute the rest is a "load" of fewer tokens. With `split`, the front may be computed while
    the back is loaded, which an engine has to be able to do.
    """
    total = sum(stretch.tokens for stretch in stretches)
    recompute = prefill.seconds(total, start=start)
    ways: list[tuple[float, int, Choice, int]] = [(recompute, 0, "recompute", 0)]
    for loaded, seconds in _prefixes(stretches):
        rest = prefill.seconds(total - loaded, start=start + loaded)
        ways.append((seconds + rest, -loaded, "load", loaded))
    all_seconds = ways[-1][0] if stretches else 0.0
    for loaded, seconds in list(_prefixes(stretches[::-1]))[:-1] if split else ():
        ways.append((max(prefill.seconds(total - loaded, start=start), seconds), 0, "both", loaded))
    best, _, choice, load_tokens = min(ways)
    return LoadPlan(
        choice=choice,
        load_tokens=load_tokens,
        compute_tokens=total - load_tokens,
        load_seconds=all_seconds,
        recompute_seconds=recompute,
        seconds=best,
    )


def _prefixes(stretches: Sequence[Stretch]) -> list[tuple[int, float]]:
    """Return for the first 1, 2, ... stretches their tokens, and the seconds until the slowest tier gave its part."""
    tokens, slowest = 0, 0.0
    sizes: dict[str, int] = {}
    found = []
    for stretch in stretches:
        tokens += stretch.tokens
        size = sizes[stretch.tier] = sizes.get(stretch.tier, 0) + stretch.size
        slowest = max(slowest, stretch.link.seconds(size))
        found.append((tokens, slowest))
    return found

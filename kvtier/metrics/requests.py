"""What a server counts of its requests, as Prometheus metrics beside those of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

try:
    from prometheus_client import Counter, Histogram
except ImportError as _missing:
    raise ConfigError("kvtier.metrics.requests needs prometheus-client: pip install 'kvtier[prometheus]'") from _missing

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

BOUNDS_SECONDS: tuple[float, ...] = tuple(0.005 * 2.0 ** (step / 2) for step in range(30))  # up to 115 s


class RequestMetrics:
    """Counts prompts' tokens and times their first answers; one per registry, safe from any thread.

    Args:
        registry: where the metrics are shown; the one of the `StoreCollector`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "kvtier_prompt_tokens",
            "Tokens of prompts, by what became of them: their KV was loaded or computed.",
            ["result"],
            registry=registry,
        )
        self._first = Histogram(
            "kvtier_first_token_seconds",
            "Time to first token: from a request's arrival to the first token of its answer.",
            buckets=BOUNDS_SECONDS,
            registry=registry,
        )

    def observe(self, *, prompt_tokens: int, loaded_tokens: int, first_token_seconds: float) -> None:
        """Count one request whose first token is there."""
        self._tokens.labels("loaded").inc(loaded_tokens)
        self._tokens.labels("computed").inc(prompt_tokens - loaded_tokens)
        self._first.observe(first_token_seconds)

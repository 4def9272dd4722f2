"""The pytest plug-in: registers the kit's markers, so that `--strict-markers` works in a project that uses the kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MARKERS = (
    "gpu: needs a CUDA device",
    "redis: needs a Redis or Valkey server",
    "s3: needs an S3-compatible server",
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)

"""The conformance kit for backends: subclass, define one fixture, and pytest does the rest.

    class TestMine(BackendConformance):
        @pytest.fixture
        def make_backend(self, tmp_path):
            return lambda: MyBackend(path=tmp_path)

The traits of the backend choose what is demanded: `persistent` adds tests that reopen, `shared` tests with two
instances. `pip install pytest pytest-asyncio` is all it needs.
"""

from __future__ import annotations

from kvtier.testing.backend_buffers import BufferTests
from kvtier.testing.backend_lifecycle import LifecycleTests
from kvtier.testing.backend_listing import ListingTests
from kvtier.testing.backend_powers import JournalConformance, SlotConformance
from kvtier.testing.backend_values import ValueTests

__all__ = ["BackendConformance", "JournalConformance", "SlotConformance"]


class BackendConformance(ValueTests, BufferTests, ListingTests, LifecycleTests):
    """Everything `kvtier.backends.base.Backend` promises."""

"""The shipped kit against the pinned-cpu backend."""

import pytest

from kvtier.backends.pinned_cpu import PinnedCpuBackend
from kvtier.testing.backends import BackendConformance, SlotConformance


class TestPinnedCpu(BackendConformance):
    arena_bytes = 48 << 20
    listing_entries = 2_500

    @pytest.fixture
    def make_backend(self):
        return PinnedCpuBackend


class TestPinnedCpuSlots(SlotConformance):
    @pytest.fixture
    def make_backend(self):
        return PinnedCpuBackend

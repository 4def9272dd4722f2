"""The shipped kit against the cuda backend, in host memory and where nothing happens that is not waited for."""

import os

import pytest

from kvtier.backends.cuda import CudaBackend
from kvtier.testing.backends import BackendConformance
from kvtier.testing.context import lend_context
from kvtier.testing.streams import LazyDevice

DEVICE = os.environ.get("KVTIER_TEST_DEVICE", "cpu")  # benchmarks.gpu sets it to "cuda"


class OnSlots(BackendConformance):
    listing_entries = 2_500

    def context(self):
        return lend_context(arena_bytes=self.arena_bytes, capacity=48 << 20)


class TestCudaOnCpu(OnSlots):
    @pytest.fixture
    def make_backend(self):
        return lambda: CudaBackend(device=DEVICE, slot_bytes=16 << 10)

    @pytest.fixture
    def make_unopenable(self):
        return lambda: CudaBackend(device="tpu")


class LazyBackend(CudaBackend):
    def _make_device(self):
        return LazyDevice()


class TestCudaWithLazyStreams(OnSlots):
    @pytest.fixture
    def make_backend(self):
        return lambda: LazyBackend(slot_bytes=16 << 10)

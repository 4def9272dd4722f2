"""Buffers of either kind as flat byte views."""

import gc
import weakref

import pytest
import torch

from kvtier.backends.views import gather, host_view, scatter, total_bytes, writable_views
from kvtier.errors import InvalidValueError


def test_memoryview_of_anything_is_flattened():
    assert host_view(memoryview(b"12345")) == b"12345"
    view = host_view(memoryview(bytearray(24)).cast("d"))
    assert (view.format, view.nbytes) == ("B", 24)
    square = host_view(memoryview(bytes(range(12))).cast("B", (3, 4)))
    assert square.shape == (12,)
    assert host_view(memoryview(b"")).nbytes == 0


def test_tensor_is_seen_not_copied():
    tensor = torch.arange(10, dtype=torch.uint8)
    view = host_view(tensor[2:7])
    assert view == bytes(range(2, 7))
    view[0] = 99
    assert tensor[2] == 99
    assert host_view(torch.empty(0, dtype=torch.uint8)).nbytes == 0
    assert host_view(torch.tensor([-1], dtype=torch.int8)) == b"\xff"


def test_view_keeps_the_tensor_alive():
    tensor = torch.full((1000,), 7, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    view = host_view(tensor)[10:20]
    del tensor
    gc.collect()
    assert alive() is not None
    assert view == bytes([7] * 10)
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4, dtype=torch.float32),
        torch.zeros((2, 2), dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(4, dtype=torch.uint8, device="meta"),
        memoryview(b"12345678")[::2],
    ],
)
def test_other_buffers_are_refused(buffer):
    with pytest.raises(InvalidValueError, match="contiguous bytes"):
        host_view(buffer)


def test_read_only_buffers_cannot_be_read_into():
    writable_views([memoryview(bytearray(3)), torch.zeros(3, dtype=torch.uint8)])
    with pytest.raises(InvalidValueError, match="read-only"):
        writable_views([memoryview(bytearray(3)), memoryview(b"123")])


def test_gather_and_scatter():
    into = memoryview(bytearray(12))
    gather([memoryview(b"12"), memoryview(b""), memoryview(b"345")], into)
    assert bytes(into) == b"12345" + bytes(7)
    parts = [memoryview(bytearray(size)) for size in (3, 0, 1, 5)]
    assert scatter(memoryview(b"123456"), parts) == 6
    assert [bytes(part) for part in parts] == [b"123", b"", b"4", b"56\0\0\0"]
    assert scatter(memoryview(b"1234567890"), parts[:3]) == 4
    assert scatter(memoryview(b""), parts) == 0
    assert total_bytes(parts) == 9

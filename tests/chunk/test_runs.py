"""Long runs of memory: bit for bit what torch would copy, by whichever way, and nothing allocated beside."""

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.chunk import runs, transfer
from kvtier.chunk.transfer import Copies

ROW = runs.LEAST_RUN // 2  # int16 elements
LAYERS = runs.LEAST_CALL // runs.LEAST_RUN
HALF = LAYERS * ROW


@pytest.fixture(params=["numpy", "torch"])
def route(request, monkeypatch):
    """Which way the copies take, told in `copied`."""
    monkeypatch.setattr(runs, "HAS_NUMPY", request.param == "numpy")
    copied = []

    def watched(targets, sources):
        copied.append(runs.copy_runs(targets, sources))
        return copied[-1]

    monkeypatch.setattr(transfer, "copy_runs", watched)
    yield copied
    if request.param == "torch":
        assert not any(copied)


def memory(halves):
    """Return so much memory in one piece, of elements that all differ from their neighbours."""
    return torch.arange(halves * HALF, dtype=torch.int64).mul_(40503).to(torch.int16)


def half(flat, number, *, every=1):
    """Return a half as [LAYERS, ROW], dense or with its rows `every` so far apart."""
    return flat[number * HALF : (number + every) * HALF].view(LAYERS, every, ROW)[:, 0]


GEOMETRY = {  # where the two sources begin and the two targets, in halves; how far apart the rows of sources are
    "sources first": ((0, 1), (2, 3), 1),
    "targets first": ((2, 3), (0, 1), 1),
    "the second source first": ((1, 0), (2, 3), 1),
    "the targets between the sources": ((0, 3), (1, 2), 1),
    "sources between the targets": ((1, 2), (0, 3), 1),
    "strided sources": ((0, 4), (8, 9), 4),
    "strided sources around the targets": ((0, 6), (4, 5), 4),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_two_halves_wherever_they_lie(name, route):
    sources, targets, every = GEOMETRY[name]
    flat = memory(10)
    wanted = [half(flat, at, every=every).tolist() for at in sources]
    copies = Copies()
    for at, into in zip(sources, targets, strict=True):
        copies.add(half(flat, at, every=every), half(flat, into))
    tracemalloc.start()
    copies.run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [half(flat, into).tolist() for into in targets] == wanted
    assert peak < runs.LEAST_CALL / 4  # numpy's own buffers would show
    assert route == [runs.HAS_NUMPY]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float64, torch.complex128, torch.bool])
def test_every_dtype(dtype, route):
    count = 2 * runs.LEAST_CALL // dtype.itemsize
    content = torch.randint(0, 255, (2 * runs.LEAST_CALL,), dtype=torch.uint8)
    source = content.view(dtype).view(4, count // 4)
    into = bytearray(2 * runs.LEAST_CALL)
    transfer.copy_in(source, memoryview(into))
    assert bytes(into) == bytes(content.tolist())
    assert route == [runs.HAS_NUMPY]


def test_rows_that_lie_between_each_other_are_left_to_torch(route):
    flat = memory(4).view(2 * LAYERS, 2, ROW)
    wanted = flat[:, 0].tolist()
    copies = Copies()
    copies.add(flat[:, 0], flat[:, 1])
    copies.run()
    assert flat[:, 1].tolist() == wanted
    assert route == [False]


@pytest.mark.parametrize("what", ["short runs", "little memory"])
def test_what_torch_does_better(what, route):
    flat = memory(4)
    source = flat.view(-1, ROW)[:, : ROW - 1] if what == "short runs" else flat[: HALF - ROW]
    target = torch.zeros_like(source, memory_format=torch.contiguous_format)
    transfer.copy_between(source, target)
    assert torch.equal(source, target)
    assert route == [False]


def test_an_inference_tensor_is_filled(route):
    with torch.inference_mode():
        target = torch.zeros(LAYERS, ROW, dtype=torch.int16)
    source = half(memory(1), 0)
    transfer.copy_between(source, target)
    assert torch.equal(source, target)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_pairs_equal_torch(data):
    """Any number of pairs of random geometry, groups of them alike; limits are low, so that all go by numpy."""
    flat = torch.arange(4096, dtype=torch.int64).mul_(40503).to(torch.int16)
    copies, wanted, found = [], torch.zeros(4096, dtype=torch.int16), torch.zeros(4096, dtype=torch.int16)
    free = 0
    alike = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 6))):
        if not copies or not alike:
            rows, row, gap = (data.draw(st.integers(1, most)) for most in (6, 40, 3))
        begin = data.draw(st.integers(0, 4096 - rows * row * gap))
        source = flat[begin : begin + rows * row * gap].view(rows, gap, row)[:, 0]
        free += data.draw(st.integers(0, 9))
        copies.append((source, slice(free, free + rows * row), (rows, row)))
        free += rows * row
    for source, at, shape in copies:
        wanted[at].view(shape).copy_(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "LEAST_RUN", 1)
        patch.setattr(runs, "LEAST_CALL", 1)
        assert runs.copy_runs([found[at].view(shape) for _, at, shape in copies], [source for source, *_ in copies])
    assert torch.equal(wanted, found)

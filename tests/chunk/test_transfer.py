"""Copies between tensors and plain memory."""

import contextlib
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chunk import transfer
from kvtier.chunk.dtypes import ITEMSIZE, dtype_name, raw_size
from kvtier.chunk.memory import copy_bytes
from kvtier.chunk.segments import SegmentSpec
from kvtier.chunk.serial import on_this_thread
from kvtier.chunk.tensors import torch_dtype
from kvtier.chunk.transfer import Copies, check_target, copy_between, copy_in, copy_out, tensor_over
from kvtier.errors import InvalidValueError

L, T, H, D = 3, 8, 2, 6
WHOLE = 5 * T


def spec_for(tensor, **fields):
    return SegmentSpec(name="k", dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), **fields)


def numbered(shape, dtype=torch.int16):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).to(dtype).reshape(shape)


CHUNKS = {
    "LTHD": lambda whole: whole[:, T : 2 * T],
    "LHTD": lambda whole: whole.permute(0, 2, 1, 3).contiguous()[:, :, T : 2 * T],
    "engine's heads first": lambda whole: whole.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)[:, T : 2 * T],
    "odd dims": lambda whole: whole[:, 3:10, :, 1:4],
    "one layer": lambda whole: whole[1],
}


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str
)
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS.keys())
def test_in_and_out_again(chunk, dtype):
    source = chunk(numbered((L, WHOLE, H, D), dtype))
    memory = bytearray(b"\xee" * (source.numel() * source.element_size()))
    copy_in(source, memoryview(memory))
    elements = b"".join(bytes(e.reshape(1).view(torch.uint8).tolist()) for e in source.reshape(-1))
    assert memory == elements
    target_whole = torch.full((L, WHOLE, H, D), 99, dtype=dtype)
    target = chunk(target_whole)
    copy_out(memoryview(memory), spec_for(source), target)
    assert torch.equal(target, source)


@pytest.mark.parametrize("axes", ["LTHD", "LHTD"])
def test_only_the_slice_is_written(axes):
    shape = (L, WHOLE, H, D) if axes == "LTHD" else (L, H, WHOLE, D)
    whole = torch.zeros(shape, dtype=torch.bfloat16)
    dim = axes.index("T")
    target = whole.narrow(dim, T, T)
    memory = bytearray(b"\x01" * (target.numel() * 2))
    copy_out(memoryview(memory), spec_for(target), target)
    assert int((whole.view(torch.int16) == 0x0101).sum()) == target.numel()
    assert int(whole.narrow(dim, 0, T).view(torch.int16).sum()) == 0
    assert int(whole.narrow(dim, 2 * T, 3 * T).view(torch.int16).sum()) == 0


@given(
    starts=st.tuples(*[st.integers(0, 2)] * 3),
    steps=st.tuples(*[st.integers(1, 3)] * 3),
    order=st.permutations(range(3)),
    offset=st.integers(0, 9),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64]),
)
def test_any_strides(starts, steps, order, offset, dtype):
    memory = numbered((5 * 7 * 16 + 10,), dtype)[offset : offset + 5 * 7 * 16].reshape(5, 7, 16)
    source = memory[tuple(slice(start, None, step) for start, step in zip(starts, steps, strict=True))].permute(*order)
    into = bytearray(source.numel() * source.element_size())
    copy_in(source, memoryview(into))
    if not source.numel():
        return
    assert torch.frombuffer(into, dtype=dtype).tolist() == source.flatten().tolist()
    target = torch.zeros_like(memory)[tuple(slice(s, None, p) for s, p in zip(starts, steps, strict=True))].permute(
        *order
    )
    copy_out(memoryview(into), spec_for(source), target)
    assert target.flatten().tolist() == source.flatten().tolist()


def test_targets_of_every_sort():
    source = torch.randn(4, 6)
    raw = bytearray(source.numel() * 4)
    copy_in(source, memoryview(raw))
    with torch.inference_mode():
        inference = torch.zeros(4, 6)
    for target in (
        torch.zeros(4, 6),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 12)[:, ::2],
        torch.zeros(4, 6, requires_grad=True),
        torch.nn.Parameter(torch.zeros(4, 6)),
        inference,
        torch.zeros(4, 6).as_strided((4, 6), (6, 1)),
    ):
        copy_out(memoryview(raw), spec_for(source), target)
        assert torch.equal(target, source)
    row = torch.zeros(6).as_strided((1, 6), (0, 1))  # a stride of 0 harms nobody where there is one row
    copy_out(memoryview(raw)[:24], spec_for(source[:1]), row)
    assert torch.equal(row, source[:1])


BAD_TARGETS = {
    "shape": (lambda: torch.zeros(2, 3), r"float32 \[2, 3\], the value is float32 \[3, 2\]"),
    "dtype": (lambda: torch.zeros(3, 2, dtype=torch.float16), "float16"),
    "expanded": (lambda: torch.zeros(3, 1).expand(3, 2), "expanded"),
    "meta": (lambda: torch.empty(3, 2, device="meta"), "meta"),
    "sparse": (lambda: torch.zeros(3, 2).to_sparse(), "sparse"),
}


@pytest.mark.parametrize(("make", "message"), BAD_TARGETS.values(), ids=BAD_TARGETS.keys())
def test_targets_that_cannot_be_filled(make, message):
    spec = SegmentSpec(name="k", dtype="float32", shape=(3, 2))
    with pytest.raises(InvalidValueError, match=message):
        copy_out(memoryview(bytearray(24)), spec, make())


def test_lazy_targets():
    spec = SegmentSpec(name="k", dtype="complex64", shape=(3,))
    with pytest.raises(InvalidValueError, match="lazily conjugated"):
        check_target(torch.zeros(3, dtype=torch.complex64).conj(), spec)
    spec = SegmentSpec(name="k", dtype="float32", shape=(3,))
    with pytest.raises(InvalidValueError, match="negated"):
        check_target(torch.zeros(3, dtype=torch.complex64).conj().imag, spec)


def test_lengths_must_agree():
    source, spec = torch.zeros(3), SegmentSpec(name="k", dtype="float32", shape=(3,))
    for size in (0, 11, 13, 24):
        with pytest.raises(InvalidValueError, match="12 bytes into"):
            copy_in(source, memoryview(bytearray(size)))
        with pytest.raises(InvalidValueError, match="12 writable bytes"):
            copy_out(memoryview(bytearray(size)), spec, source)
        with pytest.raises(InvalidValueError, match="for a tensor of 12"):
            tensor_over(memoryview(bytearray(size)), spec)
    with pytest.raises(InvalidValueError, match="writable"):
        copy_out(memoryview(bytes(12)), spec, source)
    with pytest.raises(InvalidValueError, match="read-only"):
        tensor_over(memoryview(bytes(12)), spec)


def test_empty_tensors():
    copy_in(torch.zeros(0, 4), memoryview(b""))
    empty = torch.zeros(0, 4)
    copy_out(memoryview(bytearray()), spec_for(empty), empty)
    assert tensor_over(memoryview(bytearray()), spec_for(empty)).shape == (0, 4)


def test_tensors_over_memory_write_through():
    memory = bytearray(8)
    tensor = tensor_over(memoryview(memory)[2:6], SegmentSpec(name="", dtype="int16", shape=(2, 1)))
    tensor[1, 0] = 0x0201
    assert memory == b"\0\0\0\0\x01\x02\0\0"


def test_threads_copy_side_by_side():
    sources = [numbered((4, 300, 3, 8)) + i for i in range(8)]
    memories = [bytearray(s.numel() * 2) for s in sources]
    targets = [torch.zeros_like(s) for s in sources]

    def run(i):
        for _ in range(20):
            copy_in(sources[i][:, 10:], memoryview(memories[i])[: 4 * 290 * 3 * 8 * 2])
            copy_out(memoryview(memories[i])[: 4 * 290 * 3 * 8 * 2], spec_for(sources[i][:, 10:]), targets[i][:, 10:])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(t[:, 10:], s[:, 10:]) for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("into", ["same", "transposed", "odd rows"])
def test_between_tensors(dtype, into):
    source = numbered((6, 10), torch.int32).to(dtype)[1:, 2:]
    made = {
        "same": lambda: torch.zeros(5, 8),
        "transposed": lambda: torch.zeros(8, 5).t(),
        "odd rows": lambda: torch.zeros(5, 9)[:, 1:],
    }
    target = made[into]().to(dtype)
    copy_between(source, target)
    assert torch.equal(target, source)
    copy_between(source[:0], target[:0])
    if dtype.is_complex:
        copy_between(source.conj(), target)
        assert torch.equal(target, source.conj())


ROWS_OF_BYTES = {
    "whole words": (lambda b: b.view(6, 16), True),
    "some rows": (lambda b: b.view(6, 16)[1::2], True),
    "words in rows": (lambda b: b.view(6, 16)[:, 8:], True),
    "odd rows": (lambda b: b[:90].view(10, 9)[:, :8], False),
    "odd planes": (lambda b: b[:72].view(2, 36).unflatten(1, (4, 9))[:, :2, :8], False),
    "odd offset": (lambda b: b[3:91].view(11, 8), False),
    "odd length": (lambda b: b.view(8, 12), False),
    "every other": (lambda b: b.view(6, 16)[:, ::2], False),
    "transposed": (lambda b: b.view(6, 16).t(), False),
    "one byte": (lambda b: b[0], False),
}


@pytest.mark.parametrize(("rows", "in_words"), ROWS_OF_BYTES.values(), ids=ROWS_OF_BYTES.keys())
def test_bytes_move_by_words_where_rows_allow_it(rows, in_words):
    source, memory = rows(numbered((96,), torch.uint8)), torch.zeros(96, dtype=torch.uint8)
    assert transfer._in_words(source) == in_words
    copy_between(source, rows(memory))
    assert torch.equal(rows(memory), source)
    copy_in(source, memoryview(raw := bytearray(source.nbytes)))
    assert list(raw) == source.flatten().tolist()


def test_between_tensors_that_differ():
    for target in (torch.zeros(3), torch.zeros(2, dtype=torch.int32), torch.zeros(1).expand(2)):
        with pytest.raises(InvalidValueError, match="target"):
            copy_between(torch.zeros(2), target)
    with pytest.raises(InvalidValueError, match="sparse"):
        copy_between(torch.zeros(2).to_sparse(), torch.zeros(2))


# Threads


def in_a_thread(action):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(action()))
    thread.start()
    thread.join()
    return answers[0]


class Watched:
    """Stands in for a target; notes how many threads torch would use for its copy."""

    def __init__(self, error=None):
        self.threads = []
        self._error = error

    def copy_(self, source):
        torch.zeros(1 << 20).add_(1)  # something that torch would split
        self.threads.append((torch.get_num_threads(), in_a_thread(torch.get_num_threads)))
        if self._error:
            raise self._error


@pytest.mark.skipif(torch.get_num_threads() == 1, reason="torch has one thread anyway")
@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_copies_use_the_calling_thread_only(error):
    usual = torch.get_num_threads()
    target = Watched(error)
    with pytest.raises(ZeroDivisionError) if error else contextlib.nullcontext():
        on_this_thread(lambda: target.copy_(torch.zeros(1)))
    assert target.threads == [(1, usual)], "the setting is not this thread's own"
    assert torch.get_num_threads() == usual


@pytest.mark.skipif(torch.get_num_threads() == 1, reason="torch has one thread anyway")
def test_a_thread_that_never_used_torch_before():
    """Torch sets a thread up on first use; that must not undo what the copy asked for."""
    target = Watched()
    in_a_thread(lambda: on_this_thread(lambda: target.copy_(torch.zeros(1))))
    assert target.threads == [(1, torch.get_num_threads())]


# Byte copies, dtypes


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17])
@pytest.mark.parametrize("read_only", [False, True])
def test_copy_bytes(size, read_only):
    raw = (bytes(range(251)) * (size // 251 + 1))[:size]
    source = memoryview(raw) if read_only else memoryview(bytearray(raw))
    memory = bytearray(b"\xee" * (size + 2))
    copy_bytes(source, memoryview(memory)[1:-1])
    assert memory == b"\xee" + raw + b"\xee"


def test_copy_bytes_checks_lengths():
    for sizes in ((3, 4), (4, 3), (2 << 20, 3 << 20)):
        with pytest.raises(ValueError, match="bytes into"):
            copy_bytes(memoryview(bytearray(sizes[0])), memoryview(bytearray(sizes[1])))


@pytest.mark.parametrize("name", sorted(ITEMSIZE.keys() - {"bytes"}))
def test_the_table_agrees_with_torch(name):
    assert torch_dtype(name).itemsize == ITEMSIZE[name]
    assert dtype_name(torch_dtype(name)) == dtype_name(name) == name


@pytest.mark.parametrize("name", ["object", "bytes", "complex32", "quint8", "nn", "__import__", "", "torch.load"])
def test_names_outside_the_table(name):
    with pytest.raises(InvalidValueError, match="known: bfloat16"):
        dtype_name(name)
    with pytest.raises(InvalidValueError, match="no torch dtype"):
        torch_dtype(name)


def test_raw_size():
    assert raw_size("bfloat16", (2, 3, 4)) == 48
    assert raw_size("float64", ()) == 8
    assert raw_size("int8", (0, 1 << 40)) == 0
    assert raw_size("int8", (1,) * 15 + (1 << 47,)) == 1 << 47
    for dtype, shape in (
        ("uint8", (-1,)),
        ("pickle", (1,)),
        ("uint8", (1 << 48,)),
        ("uint8", (0, 1 << 30, 1 << 30)),
        ("uint8", (1,) * 17),
    ):
        with pytest.raises(InvalidValueError):
            raw_size(dtype, shape)


def test_collected_copies_are_made_together_and_in_their_order():
    sources = [torch.randn(3, 5).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int8, torch.bool)]
    sources.append(torch.randn(4, 4, dtype=torch.complex128).conj().T)
    targets = [torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources]
    into, empty = bytearray(sources[0].nbytes), torch.empty(0, 5)
    copies = Copies()
    for source, target in zip(sources, targets, strict=True):
        copies.add(source, target)
    copies.add(empty, torch.empty(0, 5))
    copies.add(torch.ones(3, 5), targets[1])  # over what was copied there before
    copies.add_in(sources[0], memoryview(into))
    assert all(not target.any() for target in targets)
    copies.run()
    wanted = [*sources]
    wanted[1] = torch.ones(3, 5)
    assert all(torch.equal(target, source) for target, source in zip(targets, wanted, strict=True))
    assert torch.equal(torch.frombuffer(into, dtype=torch.bfloat16).view(3, 5), sources[0])
    targets[1].zero_()
    copies.run()  # nothing is left
    assert not targets[1].any()


def test_collected_copies_reach_inference_tensors_among_others():
    with torch.inference_mode():
        inside = torch.zeros(4)
    outside, source = torch.zeros(4), torch.arange(4.0)
    copies = Copies()
    copies.add(source, inside)
    copies.add(source, outside)
    copies.run()
    assert torch.equal(inside, source)
    assert torch.equal(outside, source)
    assert not outside.is_inference()


def test_a_collected_copy_that_does_not_fit_is_refused_when_it_is_added():
    copies = Copies()
    with pytest.raises(InvalidValueError):
        copies.add(torch.zeros(3), torch.zeros(4))
    with pytest.raises(InvalidValueError):
        copies.add_in(torch.zeros(3), memoryview(bytearray(11)))
    copies.run()

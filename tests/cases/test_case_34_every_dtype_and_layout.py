"""Case 34: tensors of every dtype, shape and memory layout come back bit for bit, or are refused by name."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from kvtier.errors import InvalidValueError
from kvtier.store import open_chunks

DTYPES = [
    *[torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
    *[torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128],
    *[torch.uint16, torch.uint32, torch.uint64],
]
SHAPES = [(), (0,), (0, 4), (3, 0, 2), (1,), (1, 1, 1), (7,), (3, 5), (2, 3, 1, 2, 5), (257, 33)]
TIERS = ["memory", "disk", "disk with zstd", "memory, then disk with zstd"]


def config_of(shape, path):
    memory = {"backend": "pinned-cpu", "capacity": "32MiB"}
    disk = {"backend": "local-disk", "name": "disk", "path": str(path), "capacity": "64MiB"}
    tiers = {
        "memory": [memory],
        "disk": [disk],
        "disk with zstd": [disk | {"codecs": ["zstd"]}],
        "memory, then disk with zstd": [memory, disk | {"codecs": ["zstd"]}],
    }[shape]
    return {"deadline_seconds": 60, "memory": {"staging_bytes": "8MiB"}, "tiers": tiers}


@pytest.fixture(params=TIERS)
async def store(request, tmp_path):
    async with open_chunks(config_of(request.param, tmp_path)) as store:
        yield store


def bits(tensor):
    """The elements' bytes in row-major order, by way of a copy of torch's own and its plain memory."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    with torch.no_grad():
        plain.copy_(tensor)
    return stored(plain)


def stored(tensor):
    """All bytes of the storage behind a tensor."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def of_bytes(raw, dtype, shape):
    """A tensor over these bytes."""
    if not torch.Size(shape).numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)


def some(dtype, shape, seed=0):
    """Any bits at all: NaN payloads, infinities, subnormals and both zeros are among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    chosen = torch.Generator().manual_seed(seed)
    return of_bytes(torch.randint(0, limit, (size,), generator=chosen).tolist(), dtype, shape)


def special_bits(dtype):
    """All bit patterns of one and two bytes; of wider floats both zeros, infinities, NaN payloads and subnormals."""
    if dtype is torch.bool:
        return of_bytes([0, 1, 1, 0], dtype, (4,))
    if dtype.itemsize == 1:
        return of_bytes(list(range(256)), dtype, (256,))
    if dtype.itemsize == 2:
        return of_bytes([byte for low in range(256) for high in range(256) for byte in (low, high)], dtype, (256, 256))
    size = {torch.complex64: 4, torch.complex128: 8}.get(dtype, dtype.itemsize)
    exponent = {4: 0x7F800000, 8: 0x7FF0000000000000}[size]
    sign, quiet = 1 << (8 * size - 1), exponent >> 8 & ~(exponent << 1)
    words = [0, sign, exponent, sign | exponent, exponent | 1, exponent | 0x1234, sign | exponent | quiet | 0x55]
    words += [1, sign | 1, 0x7FFF, exponent - 1, sign - 1, 2 * sign - 1, 0x0102030405060708 % (2 * sign)]
    raw = [byte for word in words for byte in word.to_bytes(size, "little")]
    return of_bytes(raw, dtype, (len(raw) // dtype.itemsize,))


async def assert_comes_back(store, tensor):
    """From the top tier and from the medium, as a tensor of its own that is contiguous and has no graph."""
    wanted = bits(tensor)
    await store.put("key", tensor)
    await store.put("map", {"x": tensor, "": tensor})
    await store.flush()
    found = await store.get("key")
    mapping = await store.get("map")
    assert list(mapping) == ["x", ""]
    for one in (found, *mapping.values()):
        assert type(one) is torch.Tensor
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        assert one.is_contiguous()
        assert not one.requires_grad
        assert not one.is_conj()
        assert bits(one) == wanted
        assert stored(one) == wanted, "more came along than the elements"
    into = torch.zeros(tensor.shape, dtype=tensor.dtype)
    assert await store.get("key", into=into) is into
    assert bits(into) == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_every_shape_of_every_dtype(store, dtype):
    for number, shape in enumerate(SHAPES):
        await assert_comes_back(store, some(dtype, shape, seed=number))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_special_bits(store, dtype):
    await assert_comes_back(store, special_bits(dtype))


LAYOUTS = {
    "transposed": lambda tensor: tensor.transpose(1, 3),
    "transposed, then sliced": lambda tensor: tensor.permute(3, 0, 2, 1)[1:, :, ::2],
    "strided slice": lambda tensor: tensor[::2, 1:, ::3, 1::2],
    "last element of each row": lambda tensor: tensor[..., -1],
    "an odd offset": lambda tensor: tensor.view(-1)[3:][:7],
    "whole words from an odd offset": lambda tensor: tensor.view(-1)[1:9],
    "whole words in rows of odd length": lambda tensor: tensor.view(-1, 15)[:, :8],
    "expanded": lambda tensor: tensor[:1].expand(5, -1, -1, -1),
    "expanded from one element": lambda tensor: tensor.view(-1)[5].expand(4, 3),
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "overlapping windows": lambda tensor: tensor.view(-1).unfold(0, 4, 1),
    "one of a split": lambda tensor: tensor.split(2, dim=1)[1],
    "scalar view": lambda tensor: tensor[1, 2, 3, 0],
    "no elements, odd strides": lambda tensor: tensor[:, 2:2].transpose(0, 3),
    "flipped": lambda tensor: tensor.flip(0),
    "broadcast": lambda tensor: torch.broadcast_to(tensor[0, 0, 0], (3, 2, tensor.shape[-1])),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
async def test_every_layout(store, layout):
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.complex64, torch.int64):
        await assert_comes_back(store, LAYOUTS[layout](some(dtype, (4, 3, 6, 5))))


async def test_gradients_inference_and_lazy_views(store):
    numbers = some(torch.float32, (4, 6))
    await assert_comes_back(store, numbers.clone().requires_grad_())
    await assert_comes_back(store, torch.nn.Parameter(numbers))
    await assert_comes_back(store, numbers.clone().requires_grad_() * 1.0)
    with torch.inference_mode():
        await assert_comes_back(store, numbers * 1.0)
    values = torch.randn(3, 4, dtype=torch.complex64)
    assert values.conj().is_conj()
    await assert_comes_back(store, values.conj())
    await assert_comes_back(store, values.conj().t()[1:])
    assert values.conj().imag.is_neg()
    await assert_comes_back(store, values.conj().imag)


async def test_only_the_elements_of_a_view_are_stored(store):
    """The storage is of 1 GiB, of which a few pages are ever touched."""
    giant = torch.empty(1 << 30, dtype=torch.uint8)
    view = giant[12345 : 12345 + 4000 * 5].view(4000, 5)[:, ::2]
    view.fill_(7)
    await assert_comes_back(store, view)
    (entry,) = [entry async for entry in store.list("key")]
    assert all(size < 4 * view.numel() for size in entry.tiers.values()), entry


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "bit of another kind": lambda: torch.empty(4, dtype=torch.bits8),
    "quantised": lambda: torch._empty_affine_quantized([4], scale=0.5, zero_point=0, dtype=torch.qint8),
    "fake": lambda: Fake(torch.ones(2)),
}


class Fake(torch.Tensor):
    """A subclass, whose elements may mean anything."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_subclass(cls, inner)


@pytest.mark.filterwarnings("ignore")  # torch's own, about prototypes and deprecations
@pytest.mark.parametrize("kind", sorted(REFUSED))
async def test_what_is_not_plain_elements_is_refused_and_changes_nothing(store, kind):
    await store.put("key", b"before")
    value = REFUSED[kind]()
    with pytest.raises(InvalidValueError):
        await store.put("key", value)
    with pytest.raises(InvalidValueError):
        await store.put("map", {"good": torch.ones(2), "bad": value})
    results = await store.put_many({"good": torch.ones(2), "key": value})
    assert isinstance(results["key"], InvalidValueError)
    assert await store.get("key") == b"before"
    assert await store.get("map") is None
    assert bits(await store.get("good")) == bits(torch.ones(2))


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # whoever imports it now fails
import asyncio, warnings
warnings.simplefilter("ignore")
import torch
from kvtier.store import open_chunks

async def main():
    tensors = {str(dtype): torch.ones(3, 4).to(dtype) for dtype in [
        torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64, torch.float64]}
    tiers = [{"backend": "local-disk", "path": sys.argv[1], "capacity": "64MiB", "codecs": ["zstd"]}]
    async with open_chunks({"deadline_seconds": 60, "tiers": tiers}) as store:
        await store.put_many({name: tensor.t() for name, tensor in tensors.items()}, wait="durable")
    async with open_chunks({"deadline_seconds": 60, "tiers": tiers}) as store:
        for name, tensor in tensors.items():
            found = await store.get(name)
            assert found.dtype == tensor.dtype and found.tolist() == tensor.t().tolist(), name
    print("all came back")

asyncio.run(main())
"""


def test_without_numpy(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout == "all came back\n", run.stderr

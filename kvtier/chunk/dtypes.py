"""The closed table of element types a chunk may hold: names and sizes, without torch."""

from __future__ import annotations

from kvtier.errors import InvalidValueError

# Name -> bytes per element. Names are torch's, so that `str(tensor.dtype)` maps to them; "bytes" is a plain byte
# string. A name that is not here is never looked up anywhere else.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "bytes": 1,
}

# No tensor has more elements, counting an empty dimension as one; keeps hostile shapes from overflowing strides.
MAX_ELEMENTS = 1 << 47
MAX_DIMENSIONS = 16


def dtype_name(dtype: object) -> str:
    """Return the table's name for a torch dtype or for a name ("bfloat16", "torch.bfloat16").

    Raises:
        InvalidValueError: not in the table.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE or name == "bytes":
        known = ", ".join(sorted(set(ITEMSIZE) - {"bytes"}))
        raise InvalidValueError(f"dtype {name!r} cannot be stored; known: {known}")
    return name


def raw_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense array of `shape`.

    Raises:
        InvalidValueError: dtype not in the table, a negative dimension, or sizes no tensor can have.
    """
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise InvalidValueError(f"dtype {dtype!r} is not in the table of storable types")
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidValueError(f"{len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    spread = elements = 1
    for length in shape:
        if length < 0:
            raise InvalidValueError(f"negative dimension in shape {shape}")
        elements *= length
        spread *= max(length, 1)
    if spread > MAX_ELEMENTS:
        raise InvalidValueError(f"shape {shape} has more than {MAX_ELEMENTS} elements")
    return elements * itemsize

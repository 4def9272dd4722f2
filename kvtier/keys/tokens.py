"""Token sequences of every integer container, as one row of little-endian 32-bit words."""

from __future__ import annotations

import ctypes
import operator
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard

from kvtier.errors import InvalidKeyError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

TokenSource: TypeAlias = "Sequence[int] | Buffer | torch.Tensor"
"""What a prompt's tokens may come in: `Sequence[int]`, `array`, or a numpy or torch integer array."""

MAX_TOKEN: Final = 2**32 - 1
WORD: Final = 4  # bytes

_INTEGER_CODES: Final = frozenset("bBhHiIlLqQnN")
_ARRAY_CODES: Final = {1: "bB", 2: "hH", 4: "iI", 8: "qQ"}
_TORCH_INTEGERS: Final = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def token_words(tokens: TokenSource) -> bytes:
    """Copy tokens into little-endian uint32 words: the same bytes whatever they came in.

    One dimension, or two with one row (`[1, n]`, as tokenizers return for one prompt). Device tensors come to host.

    Raises:
        InvalidKeyError: for a token that is a bool, no integer, negative or above 2**32 - 1 (index and value are
            named), for another shape, and for `str`, `bytes` and `bytearray`, which do not say how wide a token is.
    """
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidKeyError(
            f"tokens come as {type(tokens).__name__}; give integers, e.g. a list, array('I') or an integer tensor"
        )
    if isinstance(tokens, list | tuple):
        return _from_sequence(tokens)
    if _is_tensor(tokens):
        return _from_tensor(tokens)
    view = _buffer_of(tokens)
    if view is not None:
        return _from_view(view)
    if isinstance(tokens, Sequence):
        return _from_sequence(tokens)
    raise InvalidKeyError(f"tokens come as {type(tokens).__name__}; give a sequence, array or tensor of integers")


def _is_tensor(tokens: object) -> TypeGuard[torch.Tensor]:
    torch_module = sys.modules.get("torch")  # a tensor cannot exist unless torch is loaded: no import needed
    return torch_module is not None and isinstance(tokens, torch_module.Tensor)


def _buffer_of(tokens: object) -> memoryview | None:
    try:
        return memoryview(tokens)  # type: ignore[arg-type]  # asking is the test for the buffer protocol
    except (TypeError, ValueError, BufferError):  # numpy raises ValueError for dtypes without a buffer format
        return None


def _from_sequence(tokens: Sequence[object]) -> bytes:
    exact = {int}.issuperset(map(type, tokens))
    values: Sequence[object] = tokens if exact else [_integer(index, token) for index, token in enumerate(tokens)]
    try:
        words = array("I", values)  # type: ignore[type-var]  # every element is an int by now
    except OverflowError:
        raise _first_refusal(values) from None
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _integer(index: int, token: object) -> int:
    """Unwrap an integer scalar of another library; a bool of any library is none."""
    if not isinstance(token, bool) and "bool" not in str(getattr(token, "dtype", "")):
        try:
            return operator.index(token)  # type: ignore[arg-type]  # the TypeError is the answer
        except (TypeError, ValueError, RuntimeError):
            pass
    raise _refusal(index, token)


def _from_view(view: memoryview) -> bytes:
    order, code = view.format[:-1], view.format[-1:]
    if code not in _INTEGER_CODES or order not in {"", "@", "=", "<", ">", "!"}:
        raise InvalidKeyError(f"tokens come in a buffer of format {view.format!r}; give integers")
    _check_shape(view.shape or ())
    big_endian = order in {">", "!"} or (order != "<" and sys.byteorder == "big")
    return _from_raw(view.tobytes(), view.itemsize, signed=code.islower(), big_endian=big_endian)


def _from_raw(raw: bytes, size: int, *, signed: bool, big_endian: bool) -> bytes:
    """Check and resize integers of `size` bytes, one byte plane at a time: C loops only, without numpy."""
    if big_endian and size > 1:
        swapped = array(_ARRAY_CODES[size][1], raw)
        swapped.byteswap()
        raw = swapped.tobytes()
    negative = signed and not raw[size - 1 :: size].isascii()
    if negative or any(raw[plane::size].strip(b"\0") for plane in range(WORD, size)):
        values = array(_ARRAY_CODES[size][0 if signed else 1], raw)
        if sys.byteorder == "big":
            values.byteswap()
        raise _first_refusal(values)
    if size == WORD:
        return raw
    words = bytearray(len(raw) // size * WORD)
    for plane in range(min(size, WORD)):
        words[plane::WORD] = raw[plane::size]
    return bytes(words)


def _from_tensor(tensor: torch.Tensor) -> bytes:
    import torch  # noqa: PLC0415  # loaded already: this is its tensor

    name = str(tensor.dtype)
    if name not in _TORCH_INTEGERS:
        raise InvalidKeyError(f"tokens come in a tensor of dtype {name}; give integers, e.g. tokens.long()")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InvalidKeyError(
            f"tokens come in a tensor without plain storage ({tensor.layout}, device {tensor.device})"
        )
    _check_shape(tuple(tensor.shape))
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    # not through numpy, which may be absent, nor through torch kernels, whose threads take tens of ms on a busy machine
    raw = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
    return _from_raw(raw, flat.element_size(), signed="uint" not in name, big_endian=sys.byteorder == "big")


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):  # noqa: PLR2004  # [n] or [1, n]
        return
    raise InvalidKeyError(f"tokens have shape {list(shape)}; give one prompt: [n] or [1, n], e.g. tokens[row]")


def _first_refusal(values: Sequence[object]) -> InvalidKeyError:
    """Return the error for the first value out of range; there is one, unless the values changed meanwhile."""
    for index, value in enumerate(values):
        if not isinstance(value, int) or not 0 <= value <= MAX_TOKEN:
            return _refusal(index, value)
    return InvalidKeyError("tokens changed while they were read")


def _refusal(index: int, token: object) -> InvalidKeyError:
    shown = repr(token)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."  # noqa: PLR2004  # a whole nested list says nothing more
    kind = type(token).__name__
    return InvalidKeyError(f"token {index} is {shown} ({kind}); tokens are integers from 0 to {MAX_TOKEN}")

"""Traces from files: JSON lines, plain or zstd-compressed, in Mooncake's format or a generic one of prefix hashes."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Final

from kvtier.errors import InvalidValueError
from kvtier.sim.trace import Request, Trace

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping

MOONCAKE_BLOCK_TOKENS: Final = 512


def read_trace(path: pathlib.Path, *, block_tokens: int | None = None) -> Trace:
    """Return the trace in a `.jsonl` or `.jsonl.zst` file.

    Each line is an object. Mooncake's fields are `timestamp` (milliseconds), `input_length` (tokens) and `hash_ids`;
    the generic ones are `seconds`, `tokens` and `keys`, and optionally `session`, `ends_session`, `priority`. A hash or
    key stands for a block of `block_tokens` tokens (512 when nothing tells) and everything before it. What
    `kvtier.sim.recording.Recorder` wrote is of the generic kind.

    Raises:
        InvalidValueError: a line that is neither; it names the line.
        OSError: the file cannot be read.
    """
    tokens_each = block_tokens or 0
    names: dict[object, str] = {}
    requests = []
    for number, line in enumerate(_lines(path), 1):
        tokens_each = tokens_each or _block_tokens(line)
        if line.strip():
            requests.append(_request(line, tokens_each, names, place=f"{path.name}, line {number}"))
    if not requests:
        raise InvalidValueError(f"{path.name}: holds no request")
    requests.sort(key=lambda request: request.seconds)
    return Trace(path.name, requests, tokens_each)


def _block_tokens(line: str) -> int:
    """Return what the first line tells of the blocks: recordings of a store do."""
    try:
        told = json.loads(line).get("block_tokens")
    except (json.JSONDecodeError, AttributeError):
        told = None  # told with its line's number in a moment
    return told if type(told) is int and told > 0 else MOONCAKE_BLOCK_TOKENS


def _lines(path: pathlib.Path) -> Iterator[str]:
    if path.suffix != ".zst":
        with path.open(encoding="utf-8") as file:
            yield from file
        return
    import zstandard  # noqa: PLC0415  # only for compressed traces

    with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        yield from io.TextIOWrapper(stream, encoding="utf-8")


def _request(line: str, block_tokens: int, names: dict[object, str], *, place: str) -> Request:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as exc:
        raise InvalidValueError(f"{place}: is no JSON: {exc}") from None
    if not isinstance(fields, dict):
        raise InvalidValueError(f"{place}: is no object but {type(fields).__name__}")
    mooncake = "hash_ids" in fields
    ids = fields.get("hash_ids" if mooncake else "keys")
    seconds = fields.get("timestamp" if mooncake else "seconds")
    if not isinstance(ids, list) or not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise InvalidValueError(f"{place}: needs hash_ids and timestamp, or keys and seconds")
    if any(not isinstance(key, int | str) for key in ids):
        raise InvalidValueError(f"{place}: a hash is an integer or a text")
    tokens = _count(fields, "input_length" if mooncake else "tokens", len(ids) * block_tokens, place)
    return Request(
        seconds=seconds / 1000 if mooncake else float(seconds),
        keys=[names.setdefault(key, str(key)) for key in ids],  # one object for each key: comparing is cheap
        full=min(len(ids), tokens // block_tokens),
        tokens=tokens,
        session=_text(fields, "session", place),
        priority=_count(fields, "priority", 0, place),
        ends_session=fields.get("ends_session") is True,
    )


def _count(fields: Mapping[str, object], name: str, default: int, place: str) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValueError(f"{place}: {name} is {value!r}; write an integer")
    return value


def _text(fields: Mapping[str, object], name: str, place: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValueError(f"{place}: {name} is {value!r}; write a text")
    return value

"""How to reach a bucket: the S3 backend's options, checked before anything is connected."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.options import Secret

Addressing = Literal["auto", "path", "virtual"]
DataPath = Literal["sockets", "aioboto3"]

LEAST_PART_BYTES = 5 << 20  # S3 takes no smaller parts, except as the last one
MOST_PARTS = 10_000
_MOST_KEY_BYTES = 1024
_LONGEST_KEY_TAIL = 160  # "entries/" and a name of 120, or a journal's name

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """See `S3Backend`."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    access_key: Secret | None
    secret_key: Secret | None
    session_token: Secret | None
    profile: str | None
    addressing: Addressing
    storage_class: str | None
    whole_bytes: int
    part_bytes: int
    signed_payload: bool
    data_path: DataPath
    ca_file: Path | None
    lazy: bool

    @property
    def where(self) -> str:
        """The bucket and prefix, for messages."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def max_value_bytes(self) -> int:
        """The largest value that so many parts hold."""
        return min(MOST_PARTS * self.part_bytes, 5 << 40)

    def check(self) -> None:
        """Raise `ConfigError` for what cannot work with any server."""
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(f"bucket={self.bucket!r} is no name of a bucket: 3-63 of [a-z0-9.-]")
        if self.prefix and (not self.prefix.endswith("/") or self.prefix.startswith("/") or "//" in self.prefix):
            raise ConfigError(f"prefix={self.prefix!r}; write folders that end in one '/', such as 'kv/', or ''")
        if any(ord(character) < 0x20 or ord(character) == 0x7F for character in self.prefix):  # noqa: PLR2004  # ASCII
            raise ConfigError(f"prefix={self.prefix!r} holds control characters")
        if any(part in {".", ".."} for part in self.prefix.split("/")):
            raise ConfigError(f"prefix={self.prefix!r} holds '.' or '..' as a folder, which some servers resolve")
        if len(self.prefix.encode()) + _LONGEST_KEY_TAIL > _MOST_KEY_BYTES:
            raise ConfigError(f"prefix of {len(self.prefix.encode())} bytes; S3 keys have at most {_MOST_KEY_BYTES}")
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError("access_key and secret_key belong together; give both, or neither to use the environment")
        if self.part_bytes < LEAST_PART_BYTES:
            raise ConfigError(f"part_bytes={self.part_bytes}; S3 takes parts of at least {LEAST_PART_BYTES} bytes")
        self._check_endpoint()

    def _check_endpoint(self) -> None:
        if self.endpoint is None:
            return
        no_url = "endpoint is no URL such as 'https://s3.example.com' or 'http://127.0.0.1:8333'"
        try:
            parts = urlsplit(self.endpoint)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            raise ConfigError(no_url) from None
        if not usable:
            raise ConfigError(no_url)
        if "@" in self.endpoint:  # not shown: what stands before it may be a password
            raise ConfigError("endpoint holds credentials; give them as access_key and secret_key")
        if parts.query or parts.fragment or parts.path not in {"", "/"}:
            raise ConfigError(f"endpoint={self.endpoint!r} has more than scheme, host and port; use bucket and prefix")

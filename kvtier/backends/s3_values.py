"""Values between buffers and a bucket: presigned requests over the store's own connections, in the store's threads."""

from __future__ import annotations

import email.utils
import math
import os
import ssl
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from kvtier.backends.foreign import translate
from kvtier.backends.s3_faults import FOREIGN, MISSING, RefusedError, code_of, refused, retry_after
from kvtier.backends.s3_retry import retried
from kvtier.backends.s3_signing import bare_url, sign
from kvtier.backends.s3_wire import BODY_STATUS, PUT_STATUS, Reply, Request, Wire
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.backends.base import BackendContext
    from kvtier.backends.s3_control import Control
    from kvtier.backends.s3_options import S3Options

EXPIRES = "kvtier-expires"  # metadata: seconds since the epoch


@dataclass(frozen=True, slots=True)
class Got:
    """Answer to a read: bytes put into the buffers, the object's size and entity tag.

    With `fits` False the answer was longer than the buffers, and nothing of it was read.
    """

    filled: int
    size: int
    etag: str
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an object without reading it."""

    size: int
    expires: float | None
    changed: float


class Values(Protocol):
    """One way to move values. A missing object is `None` or, where nothing is asked of it, `RefusedError`."""

    async def get(self, key: str, into: Sequence[memoryview], *, first: int = 0, last: int | None = None) -> Got | None:
        """Read bytes `first` to `last` (the end) of an object into buffers; a range behind its end fills nothing."""

    async def head(self, key: str) -> Head | None:
        """Look at an object."""

    async def put(self, key: str, parts: Sequence[memoryview], parameters: Mapping[str, object]) -> None:
        """Publish an object whole."""

    async def put_part(self, key: str, upload_id: str, number: int, parts: Sequence[memoryview]) -> str:
        """Store a part of a multipart upload; return its entity tag."""

    async def close(self) -> None:
        """Let go of connections."""


class SocketValues:
    """The fast way: `sendall` from and `recv_into` the caller's memory, in threads; signed by the client."""

    def __init__(self, control: Control, options: S3Options, context: BackendContext) -> None:
        self._control = control
        self._options = options
        self._context = context
        self._wire: Wire | None = None

    async def get(self, key: str, into: Sequence[memoryview], *, first: int = 0, last: int | None = None) -> Got | None:
        """See `Values`."""
        headers = {} if first == 0 and last is None else {"Range": f"bytes={first}-{'' if last is None else last}"}
        try:
            reply = await self._exchange("get_object", "GET", key, headers=headers, into=into)
        except RefusedError as exc:
            if exc.code in MISSING:
                return None
            raise
        if headers and reply.status != 206:  # noqa: PLR2004  # Partial Content
            raise BackendError(f"{self._options.where}: the server does not read ranges")
        size = size_in_range(reply.headers.get("content-range", "")) if headers else reply.length
        return Got(reply.length if reply.fits else 0, size, reply.headers.get("etag", ""), fits=reply.fits)

    async def head(self, key: str) -> Head | None:
        """See `Values`."""
        try:
            reply = await self._exchange("head_object", "HEAD", key)
        except RefusedError as exc:
            if exc.code in MISSING:
                return None
            raise
        return Head(
            reply.length,
            parse_expiry(reply.headers.get(f"x-amz-meta-{EXPIRES}")),
            _http_time(reply.headers.get("last-modified", "")),
        )

    async def put(self, key: str, parts: Sequence[memoryview], parameters: Mapping[str, object]) -> None:
        """See `Values`."""
        await self._exchange(
            "put_object", "PUT", key, headers=_signed_headers(parameters), body=parts, parameters=parameters
        )

    async def put_part(self, key: str, upload_id: str, number: int, parts: Sequence[memoryview]) -> str:
        """See `Values`."""
        reply = await self._exchange(
            "upload_part", "PUT", key, body=parts, parameters={"UploadId": upload_id, "PartNumber": number}
        )
        etag = reply.headers.get("etag", "")
        if not etag:
            raise BackendError(f"{self._options.where}: the server gives uploaded parts no ETag")
        return etag

    async def close(self) -> None:
        """See `Values`."""
        if self._wire is not None:
            self._wire.close()

    async def _exchange(
        self,
        operation: str,
        method: str,
        key: str,
        *,
        headers: Mapping[str, str] | None = None,
        into: Sequence[memoryview] = (),
        body: Sequence[memoryview] = (),
        parameters: Mapping[str, object] | None = None,
    ) -> Reply:
        deadline = time.monotonic() + self._context.deadline_seconds
        url = await self._control.presign(operation, key, **(parameters or {}))
        wire = self._wire or await self._connect(url)
        what = f"{self._options.where}: {operation}"
        request = Request(method, url, headers or {}, body)
        if self._options.signed_payload and method == "PUT":
            request = await self._signed(request, parameters or {})

        async def attempt() -> Reply:
            with translate(FOREIGN, medium=what):
                reply = await self._context.workers.run(wire.exchange, request, into, deadline)
            if reply.status in BODY_STATUS or (method == "PUT" and reply.status in PUT_STATUS):
                return reply
            raise refused(code_of(reply.status, reply.body), what, retry_after=retry_after(reply.headers))

        return await retried(attempt, deadline)

    async def _signed(self, request: Request, parameters: Mapping[str, object]) -> Request:
        """Return the request with a signature over its body, in headers instead of the URL."""
        credentials, region = await self._control.credentials()
        url = bare_url(request.url, parameters)
        job = partial(sign, url, request.headers, request.body, credentials=credentials, region=region)
        return Request("PUT", url, await self._context.workers.run(job), request.body)

    async def _connect(self, url: str) -> Wire:
        """Make the pool of connections to the server that signed URLs name; nothing is sent yet."""
        parts = urlsplit(url)
        tls = None
        if parts.scheme == "https":
            ca_file = self._options.ca_file or os.environ.get("AWS_CA_BUNDLE") or None
            with translate(FOREIGN, medium=f"ca_file={str(ca_file)!r}"):
                tls = await self._context.workers.run(_tls, None if ca_file is None else str(ca_file))
        if self._wire is None:  # nobody was faster
            port = parts.port or (443 if tls else 80)
            self._wire = Wire(parts.hostname or "", port, tls=tls, most_idle=self._context.workers.size)
        return self._wire


def parse_expiry(text: object) -> float | None:
    """Return the expiry in an object's metadata; None if there is none that makes sense."""
    try:
        expires = float(str(text))
    except ValueError:
        return None
    return expires if math.isfinite(expires) else None


def size_in_range(text: str) -> int:
    """Return an object's size from a `Content-Range`; raise `BackendError` if it is not there."""
    size = text.rpartition("/")[2]
    if not size.isdecimal():
        raise BackendError("a range of unknown size")
    return int(size)


def _tls(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def _http_time(text: str) -> float:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        return 0.0


def _signed_headers(parameters: Mapping[str, object]) -> dict[str, str]:
    """Return the headers that the presigned URL of a `put_object` with these parameters has signed."""
    headers = {}
    for name, value in parameters.items():
        if name == "Metadata" and isinstance(value, dict):
            headers.update({f"x-amz-meta-{key}": str(text) for key, text in value.items()})
        elif name == "IfNoneMatch":
            headers["If-None-Match"] = str(value)
        elif name == "StorageClass":
            headers["x-amz-storage-class"] = str(value)
    return headers

"""Control work on a bucket through aioboto3: signing, listings, deletes, copies, multipart uploads, small objects."""

from __future__ import annotations

import asyncio
import email.utils
import io
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvtier.backends.foreign import translate
from kvtier.backends.s3_faults import FOREIGN, GONE_UPLOAD, MISSING, NO_BATCHES, RefusedError, at_open, refused
from kvtier.backends.s3_retry import retried
from kvtier.backends.s3_session import client_parts
from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    import datetime
    from collections.abc import AsyncIterator, Generator

    from kvtier.backends.base import BackendContext
    from kvtier.backends.s3_options import S3Options

T = TypeVar("T")
Answer: TypeAlias = Mapping[str, Any]  # shapes are the service's own; nothing but this module looks inside

MOST_KEYS = 1000  # per request of a listing or a delete
MOST_SKEW_SECONDS = 900  # more, and S3 accepts no signature
_URL_SECONDS = 3600
_CHUNK = 64 << 10
_SETTLED_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing: key below the folder, bytes, seconds since the epoch, entity tag."""

    key: str
    size: int
    changed: float
    etag: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was begun: full key, id, when (server's time)."""

    key: str
    upload_id: str
    begun: float


class Control:
    """One aioboto3 client. Calls end within the tier's deadline and raise nothing but `BackendError`.

    None of them touches a caller's memory, so they may be cut off at any moment.
    """

    def __init__(self, options: S3Options, context: BackendContext) -> None:
        self._options = options
        self._context = context
        self._stack = AsyncExitStack()
        self._client: Any = None  # aioboto3 has no stubs
        self._ahead: float | None = None  # how far the server's clock is ahead of our monotonic one
        self._single_deletes = False  # the server does not take batches

    # --- life

    async def connect(self) -> None:
        """Make the client, and unless `lazy` have the server confirm bucket, credentials and clock.

        Raises:
            ConfigError: one of them is wrong, or aioboto3 is missing.
            BackendError: the server is out of reach or out of order.
        """
        self._parts = await self._context.workers.run(client_parts, self._options, self._context.deadline_seconds)
        with self._translating("connect"):
            try:
                self._client = await self._stack.enter_async_context(self._parts.make())
            except ValueError as exc:  # an endpoint or region that no request could be sent to
                raise ConfigError(f"{self._options.where}: {exc}") from None
        if self._options.lazy:
            return
        try:
            await self.call("open", self._client.list_objects_v2, Prefix=self._options.prefix, MaxKeys=1)
        except RefusedError as exc:
            raise at_open(exc, self._options.where) from None
        skew = self._context.clock.wall() - self.now()
        if abs(skew) > MOST_SKEW_SECONDS:
            raise ConfigError(
                f"{self._options.where}: this machine's clock is {abs(skew):.0f} s "
                f"{'ahead of' if skew > 0 else 'behind'} the server's; set it (NTP): no signature would be accepted"
            )

    async def close(self) -> None:
        """Close the client."""
        stack, self._stack, self._client = self._stack, AsyncExitStack(), None
        with self._translating("close"):
            await stack.aclose()

    # --- calls

    async def call(self, what: str, operation: Callable[..., Awaitable[Answer]], **parameters: object) -> Answer:
        """Make one call on the bucket; throttled ones are tried again, a random while later."""
        async with _limit(self._context.deadline_seconds, what) as deadline:
            return await retried(lambda: self._once(what, operation, parameters), deadline)

    async def _once(
        self, what: str, operation: Callable[..., Awaitable[Answer]], parameters: Mapping[str, object]
    ) -> Answer:
        with self._translating(what):
            answer = await operation(Bucket=self._options.bucket, **parameters)
        self._note_time(answer)
        return answer

    async def presign(self, operation: str, key: str, **parameters: object) -> str:
        """Return a URL for one request; it is a secret for an hour."""
        with self._translating(f"sign {operation}"):
            url: str = await self._client.generate_presigned_url(
                operation,
                Params={"Bucket": self._options.bucket, "Key": key, **parameters},
                ExpiresIn=_URL_SECONDS,
            )
        return url

    async def credentials(self) -> tuple[Any, str]:
        """Return credentials that hold now, and the region they are used in."""
        with self._translating("credentials"):
            credentials = await self._parts.session.get_credentials()
            if credentials is None:
                raise RefusedError("NoCredentials", self._options.where)
            return await credentials.get_frozen_credentials(), self._parts.region

    async def list_page(self, folder: str, *, after: str = "", limit: int = MOST_KEYS) -> tuple[list[Listed], bool]:
        """Return objects of a folder (a full prefix) in the order of keys, and whether there are more behind them."""
        start = {"StartAfter": folder + after} if after else {}
        answer = await self.call("list", self._client.list_objects_v2, Prefix=folder, MaxKeys=limit, **start)
        listed = [
            Listed(item["Key"].removeprefix(folder), int(item["Size"]), _seconds(item["LastModified"]), item["ETag"])
            for item in answer.get("Contents", ())
        ]
        return listed, bool(answer.get("IsTruncated"))

    async def delete(self, keys: Sequence[str]) -> list[BackendError | None]:
        """Delete objects (full keys), whether or not they are there; return the error of each that is left."""
        answers: list[BackendError | None] = []
        for first in range(0, len(keys), MOST_KEYS):
            answers += await self._delete_batch(keys[first : first + MOST_KEYS])
        return answers

    async def _delete_batch(self, keys: Sequence[str]) -> list[BackendError | None]:
        if not self._single_deletes:
            batch = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            try:
                answer = await self.call("delete", self._client.delete_objects, Delete=batch)
            except RefusedError as exc:
                if exc.code not in NO_BATCHES:
                    return [exc] * len(keys)
                self._single_deletes = True  # it wants what newer clients do not send, or never heard of batches
            except BackendError as exc:
                return [exc] * len(keys)
            else:
                return await self._left(keys, answer.get("Errors", ()))
        return list(await asyncio.gather(*(self._delete_one(key) for key in keys)))

    async def _left(self, keys: Sequence[str], errors: Sequence[Answer]) -> list[BackendError | None]:
        """Return what is left of a batch: what was not there is gone too, what was throttled is tried again alone."""
        codes = {str(error.get("Key", "")): str(error.get("Code", "") or "an error") for error in errors}
        left: list[BackendError | None] = []
        for key in keys:
            fault = None if codes.get(key, "404") in MISSING else refused(codes[key], "delete")
            throttled = isinstance(fault, RefusedError) and fault.throttled
            left.append(await self._delete_one(key) if throttled else fault)
        return left

    async def _delete_one(self, key: str) -> BackendError | None:
        try:
            await self.call("delete", self._client.delete_object, Key=key)
        except RefusedError as exc:
            return None if exc.code in MISSING else exc
        except BackendError as exc:
            return exc
        return None

    async def set_metadata(self, key: str, parameters: Mapping[str, object]) -> None:
        """Replace an object's metadata in place (the server copies it onto itself); absent ones are skipped."""
        source = {"Bucket": self._options.bucket, "Key": key}
        try:
            await self.call(
                "copy",
                self._client.copy_object,
                Key=key,
                CopySource=source,
                MetadataDirective="REPLACE",
                **parameters,
            )
        except RefusedError as exc:
            if exc.code not in MISSING:
                raise

    # --- multipart uploads

    async def begin_upload(self, key: str, parameters: Mapping[str, object]) -> str:
        """Begin one; return its id."""
        answer = await self.call("begin upload", self._client.create_multipart_upload, Key=key, **parameters)
        upload_id: str = answer["UploadId"]
        return upload_id

    async def finish_upload(
        self, key: str, upload_id: str, etags: Sequence[str], condition: Mapping[str, object]
    ) -> None:
        """Publish the object whole."""
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]}
        await self.call(
            "finish upload",
            self._client.complete_multipart_upload,
            Key=key,
            UploadId=upload_id,
            MultipartUpload=parts,
            **condition,
        )

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Give it up, and free what its parts hold; one that is gone is fine."""
        try:
            await self.call("abort upload", self._client.abort_multipart_upload, Key=key, UploadId=upload_id)
        except RefusedError as exc:
            if exc.code != GONE_UPLOAD and exc.code not in MISSING:
                raise

    async def list_uploads(self, folder: str) -> list[Upload]:
        """Return the uploads that were begun in a folder and neither finished nor aborted (the first 1,000)."""
        answer = await self.call("list uploads", self._client.list_multipart_uploads, Prefix=folder)
        return [
            Upload(item["Key"], item["UploadId"], _seconds(item["Initiated"])) for item in answer.get("Uploads", ())
        ]

    # --- values through the client: the journal's, and everything where `data_path = "aioboto3"`

    async def put(self, key: str, body: bytes, parameters: Mapping[str, object] = MappingProxyType({})) -> None:
        """Store an object."""
        await self.call("put", partial(self._send, self._client.put_object, body), Key=key, **parameters)

    async def put_part(self, key: str, upload_id: str, number: int, body: bytes) -> str:
        """Store a part of an upload; return its entity tag."""
        send = partial(self._send, self._client.upload_part, body)
        answer = await self.call("put part", send, Key=key, UploadId=upload_id, PartNumber=number)
        etag: str = answer["ETag"]
        return etag

    @staticmethod
    async def _send(operation: Callable[..., Awaitable[Answer]], body: bytes, **parameters: object) -> Answer:
        return await operation(Body=io.BytesIO(body), **parameters)  # sent piece by piece; at its front for each try

    async def get(self, key: str, take: Callable[[Answer], Awaitable[T]], *, span: str | None) -> T:
        """Hand the answer to a read, of a range if `span` is one, to `take`.

        Whatever of its body was not read is given up, with its connection.
        """
        async with _limit(self._context.deadline_seconds, "get") as deadline:
            parameters = {"Key": key} if span is None else {"Key": key, "Range": span}
            answer = await retried(lambda: self._once("get", self._client.get_object, parameters), deadline)
            with self._translating("get"):
                async with answer["Body"] as body:
                    try:
                        return await take(answer)
                    finally:
                        body.close()  # a body half read must not go back into the client's pool

    async def get_bytes(self, key: str, *, start: int, most: int) -> bytes:
        """Return what a small object holds behind its first `start` bytes."""

        async def take(answer: Answer) -> bytes:
            content = bytearray()
            async for chunk in answer["Body"].iter_chunks(_CHUNK):
                content += chunk
                if len(content) > most:
                    raise BackendError("get: the server sent more than was asked for")
            if len(content) != int(answer["ContentLength"]):
                raise BackendUnavailableError("get: the body ended early")
            return bytes(content)

        return await self.get(key, take, span=f"bytes={start}-{start + most - 1}")

    async def head(self, key: str) -> Answer:
        """Return what is known of an object."""
        return await self.call("head", self._client.head_object, Key=key)

    # --- time

    def now(self) -> float:
        """Return the server's clock, as its last answer told it; ours before the first."""
        return self._context.clock.wall() if self._ahead is None else time.monotonic() + self._ahead

    def settled(self, changed: float) -> bool:
        """Tell whether a change at this time of the server's can be told from any later one (it counts in seconds)."""
        return self.now() - changed > _SETTLED_SECONDS

    def _note_time(self, answer: Answer) -> None:
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        with suppress(ValueError, TypeError):
            self._ahead = email.utils.parsedate_to_datetime(headers.get("date", "")).timestamp() - time.monotonic()

    @contextmanager
    def _translating(self, what: str) -> Generator[None, None, None]:
        """Turn the client's exceptions into ours; their texts name operations, never credentials or URLs."""
        import aiohttp  # noqa: PLC0415  # optional: loaded by now, or nobody could raise these
        import botocore.exceptions as boto  # noqa: PLC0415  # optional

        medium = f"{self._options.where}: {what}"
        try:
            with translate(FOREIGN, medium=medium):
                yield
        except boto.ClientError as exc:
            error = exc.response.get("Error", {})
            raise refused(str(error.get("Code", "")) or "an error", medium) from None
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError):
            raise RefusedError("NoCredentials", medium) from None
        except (boto.ConnectTimeoutError, boto.ReadTimeoutError) as exc:
            raise BackendTimeoutError(f"{medium}: {type(exc).__name__}") from None
        except (boto.BotoCoreError, aiohttp.ClientError) as exc:
            raise BackendUnavailableError(f"{medium}: {type(exc).__name__}") from None


@asynccontextmanager
async def _limit(seconds: float, what: str) -> AsyncIterator[float]:
    """Cut off what takes longer; yields when that will be, in seconds of `time.monotonic`."""
    try:
        async with asyncio.timeout(seconds):
            yield time.monotonic() + seconds
    except TimeoutError as exc:
        if isinstance(exc, BackendTimeoutError):
            raise
        raise BackendTimeoutError(f"{what}: no answer within {seconds:g} s") from None


def _seconds(when: datetime.datetime) -> float:
    return when.timestamp()

"""What a store's refusals mean: its error codes in terms of our errors."""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING

from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.backends.foreign import ForeignErrors

FOREIGN: ForeignErrors = {http.client.HTTPException: BackendUnavailableError}

MISSING = frozenset({"NoSuchKey", "NotFound", "404"})
GONE_UPLOAD = "NoSuchUpload"
PRESENT = frozenset({"PreconditionFailed", "412"})
NO_BATCHES = frozenset({"MissingContentMD5", "InvalidRequest", "NotImplemented", "MalformedXML", "400", "405", "501"})
BEHIND_THE_END = frozenset({"InvalidRange", "416"})

_THROTTLED = frozenset(
    {
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "ConditionalRequestConflict",  # two conditional writes met: the next try is decided
        "OperationAborted",
        "429",
        "500",
        "502",
        "503",
        "504",
    }
)
_FULL = frozenset({"QuotaExceeded", "EntityTooLarge", "StorageFull", "XMinioStorageFull", "InsufficientStorage", "507"})
_LATE = frozenset({"RequestTimeout"})

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,80})</Code>")

_ADVICE: Mapping[str, str] = {
    "NoSuchBucket": "the bucket does not exist; create it, or correct `bucket`",
    "InvalidBucketName": "`bucket` is no name of a bucket",
    "InvalidAccessKeyId": "the server does not know this `access_key`",
    "SignatureDoesNotMatch": "the server does not accept the signature; check `secret_key` (and `region`)",
    "InvalidToken": "the server does not accept `session_token`",
    "ExpiredToken": "the `session_token` has expired",
    "NoCredentials": "no credentials; give access_key and secret_key, a profile, or the environment's",
    "AccessDenied": "access denied; these credentials need s3:ListBucket on the bucket, s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload on its objects",
    "AllAccessDisabled": "the server has disabled access to this bucket",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's; set it (NTP)",
    "AuthorizationHeaderMalformed": "the signature is for another region; set `region`",
    "AuthorizationQueryParametersError": "the signature is for another region; set `region`",
    "PermanentRedirect": "the bucket is served elsewhere; set `region` or `endpoint`",
    "IllegalLocationConstraintException": "the bucket is in another region; set `region`",
    "401": "access denied; check `access_key` and `secret_key`",
    "403": "access denied; check `access_key` and `secret_key`",
    "301": "the bucket is served elsewhere; set `region` or `endpoint`",
}


class RefusedError(BackendUnavailableError):
    """The server answered a request with an error.

    Attributes:
        code: the server's word for it, or the HTTP status.
        retry_after: seconds that the server asks to wait, 0 if it does not say.
    """

    def __init__(self, code: str, what: str, *, retry_after: float = 0.0) -> None:
        super().__init__(f"{what}: the server answered {code}")
        self.code = code
        self.retry_after = retry_after

    @property
    def throttled(self) -> bool:
        """Whether trying again soon may help."""
        return self.code in _THROTTLED


def code_of(status: int, body: bytes) -> str:
    """Return the error code in a reply, else its HTTP status."""
    found = _CODE.search(body)
    return found[1].decode() if found else str(status)


def refused(code: str, what: str, *, retry_after: float = 0.0) -> BackendError:
    """Return the error that stands for a refusal."""
    if code in _FULL:
        return CapacityError(f"{what}: the server answered {code}")
    if code in _LATE:
        return BackendTimeoutError(f"{what}: the server answered {code}")
    return RefusedError(code, what, retry_after=retry_after)


def at_open(error: RefusedError, what: str) -> BackendError | ConfigError:
    """Return what a refusal means while a backend opens: mostly that an option is wrong."""
    advice = _ADVICE.get(error.code)
    return error if advice is None else ConfigError(f"{what}: {advice} (the server answered {error.code})")


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a reply asks to wait."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0

"""Signatures over the very bytes that are sent, for servers or policies that demand them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def bare_url(presigned: str, parameters: Mapping[str, object]) -> str:
    """Return the URL of the same request without its signature."""
    names = {"PartNumber": "partNumber", "UploadId": "uploadId"}
    query = {names[name]: str(value) for name, value in parameters.items() if name in names}
    return urlunsplit([*urlsplit(presigned)[:3], urlencode(query), ""])


def sign(
    url: str,
    headers: Mapping[str, str],
    body: Sequence[memoryview],
    *,
    credentials: Any,  # noqa: ANN401  # botocore has no stubs
    region: str,
) -> dict[str, str]:
    """Return `headers` with those that sign a PUT of `body`. It hashes the body: call it in a thread."""
    from botocore.auth import S3SigV4Auth  # noqa: PLC0415  # optional
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415  # optional

    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    signer = S3SigV4Auth(credentials, "s3", region)
    signer.payload = lambda _: digest.hexdigest()  # it would read a body as `bytes`
    request = AWSRequest(method="PUT", url=url, headers=dict(headers))
    signer.add_auth(request)
    return {str(name): str(value) for name, value in request.headers.items()}

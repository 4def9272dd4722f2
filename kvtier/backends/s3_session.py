"""How the aioboto3 client is made: imported late, lean, and with its logs kept free of session tokens."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from kvtier.backends.s3_options import S3Options
    from kvtier.options import Secret

_CONNECTIONS = 32  # of the client; calls beyond wait their turn


@dataclass(frozen=True, slots=True)
class ClientParts:
    """A session, and what makes a client of it on the loop."""

    session: Any
    region: str
    make: Callable[[], AbstractAsyncContextManager[Any]]


def client_parts(options: S3Options, deadline_seconds: float) -> ClientParts:
    """Import the client library, which takes a second, and return what makes a client on the loop."""
    try:
        import aioboto3  # noqa: PLC0415  # optional
        from aiobotocore.config import AioConfig  # noqa: PLC0415  # as above
        from aiobotocore.session import AioSession  # noqa: PLC0415  # as above
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415  # as above
    except ImportError as exc:
        raise ConfigError(f"the s3 backend needs aioboto3 ({exc}); pip install 'kvtier[s3]'") from exc
    keep_secrets_out_of_logs()
    style = {} if options.addressing == "auto" else {"addressing_style": options.addressing}
    config = AioConfig(
        signature_version="s3v4",
        s3={**style, "payload_signing_enabled": options.signed_payload},
        request_checksum_calculation="when_required",  # entries carry their own checksums
        response_checksum_validation="when_required",
        connect_timeout=deadline_seconds,
        read_timeout=deadline_seconds,
        retries={"total_max_attempts": 2, "mode": "standard"},  # once more where a kept connection had ended
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
    )
    try:
        core = AioSession()
        core.register_component("data_loader", _service_descriptions())
        session = aioboto3.Session(
            botocore_session=core,
            aws_access_key_id=_text(options.access_key),
            aws_secret_access_key=_text(options.secret_key),
            aws_session_token=_text(options.session_token),
            region_name=options.region,
            profile_name=options.profile,
        )
        region = options.region or session.region_name or "us-east-1"
    except BotoCoreError as exc:
        raise ConfigError(f"{options.where}: {exc}") from None
    make = partial(
        session.client,
        "s3",
        endpoint_url=options.endpoint,
        region_name=region,
        config=config,
        verify=str(options.ca_file) if options.ca_file is not None else None,
    )
    return ClientParts(session, region, make)


@cache
def _service_descriptions() -> Any:  # noqa: ANN401  # botocore has no stubs
    """Return botocore's loader with all in it that an S3 client reads: it takes 0.2 s, which no event loop should."""
    from aiobotocore.session import AioSession  # noqa: PLC0415  # optional
    from botocore.loaders import create_loader  # noqa: PLC0415  # optional

    loader = create_loader()

    async def read_in() -> None:
        core = AioSession()
        core.register_component("data_loader", loader)
        keys = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}  # nothing is sent
        async with core.create_client("s3", region_name="us-east-1", endpoint_url="http://127.0.0.1:9", **keys):
            pass

    asyncio.run(read_in())  # in a thread, on a loop of its own
    return loader


def _text(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


class _TokenMask(logging.Filter):
    """The signer logs the request it signs, session token included."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "x-amz-security-token" in text.lower():
            record.msg, record.args = _TOKEN.sub(r"\1***", text), ()
        return True


_TOKEN = re.compile(r"(?i)(x-amz-security-token[:=\s'\"]*(?:b')?)[^\s&'\"]+")
_MASK = _TokenMask()


def keep_secrets_out_of_logs() -> None:
    """Mask session tokens in what the client library logs at DEBUG."""
    for name in ("botocore.auth", "botocore.endpoint", "aiobotocore.endpoint", "botocore.hooks", "botocore.retries"):
        logging.getLogger(name).addFilter(_MASK)

"""What bites on a bucket: versions kept of everything that is removed, uploads that nobody finishes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.cli.doctor.finding import Finding
from kvtier.cli.tiers import within
from kvtier.errors import BackendTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.config import TierConfig


async def check_bucket(tier: TierConfig, *, seconds: float) -> Sequence[Finding]:
    """Ask for the bucket's settings; nothing is found where the server, or these credentials, do not tell."""
    from botocore.exceptions import BotoCoreError, ClientError

    from kvtier.backends.s3 import S3Backend
    from kvtier.backends.s3_session import client_parts

    backend = tier.build_backend()
    if not isinstance(backend, S3Backend):
        return []
    bucket, found = backend.options.bucket, []
    parts = await asyncio.to_thread(client_parts, backend.options, seconds)
    async with parts.make() as client:
        try:
            answer = await within(client.get_bucket_versioning(Bucket=bucket), seconds, "no answer about versions")
            if answer.get("Status") == "Enabled":
                found.append(_versions(tier, bucket))
        except (BotoCoreError, ClientError, BackendTimeoutError):
            pass
        try:
            asking = client.get_bucket_lifecycle_configuration(Bucket=bucket)
            rules = (await within(asking, seconds, "no answer about the life cycle")).get("Rules", [])
        except ClientError as exc:
            if exc.response.get("Error", {}).get("Code") != "NoSuchLifecycleConfiguration":
                return found
            rules = []
        except (BotoCoreError, BackendTimeoutError):
            return found
        if not any("AbortIncompleteMultipartUpload" in rule for rule in rules):
            found.append(_uploads(tier, bucket))
    return found


def _versions(tier: TierConfig, bucket: str) -> Finding:
    return Finding(
        level="warning",
        check="bucket-versioning",
        tier=tier.name,
        text=f"bucket {bucket!r} keeps a version of all that is removed or replaced: it grows without end",
        fix="use a bucket without versioning, or a life-cycle rule that expires noncurrent versions",
    )


def _uploads(tier: TierConfig, bucket: str) -> Finding:
    return Finding(
        level="note",
        check="bucket-uploads",
        tier=tier.name,
        text=f"bucket {bucket!r} has no rule that ends uploads of processes that were killed",
        fix="run kvtier gc now and then, or add a life-cycle rule AbortIncompleteMultipartUpload",
    )

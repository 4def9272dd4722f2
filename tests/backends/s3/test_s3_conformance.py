"""The shipped kit against the S3 backend, on two servers that have no code in common.

The first server gets all of it, the other variants what they may do differently; `KVTIER_LONG=1` runs all on all.
"""

import dataclasses
import os
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from kvtier.backends.s3 import ENTRIES
from kvtier.testing.backend_buffers import BufferTests
from kvtier.testing.backend_lifecycle import LifecycleTests
from kvtier.testing.backend_listing import ListingTests
from kvtier.testing.backend_races import RaceTests
from kvtier.testing.backend_values import ValueTests
from kvtier.testing.backends import BackendConformance, JournalConformance
from kvtier.testing.context import lend_context

LONG = os.environ.get("KVTIER_LONG") == "1" or ()


@asynccontextmanager
async def patient_context():
    """As a store lends it, for machines on which a server takes its time."""
    async with lend_context(threads=8) as context:
        yield dataclasses.replace(context, deadline_seconds=60.0)


class OnS3:
    """What all classes share."""

    race_bytes = 1 << 20
    large_bytes = 12 << 20
    listing_entries = 260  # more than a page

    options: ClassVar = {}

    def context(self):
        return patient_context()

    @pytest.fixture
    def make_backend(self, request, server, folder):
        options = {"prefix": folder, **self.options}
        if "break_medium" in request.fixturenames:
            options["endpoint"] = request.getfixturevalue("proxy_url")
        return lambda: server.backend("shared", **options)

    @pytest.fixture
    def raw_read(self, folder, client):
        def read(name):
            try:
                return client.get_object(Bucket="shared", Key=f"{folder}{ENTRIES}{name}")["Body"].read()
            except client.exceptions.NoSuchKey:
                return None

        return read

    @pytest.fixture
    def make_unopenable(self, server):
        return lambda: server.backend("no-such-bucket")

    @pytest.fixture
    def break_medium(self, proxy):
        def go_away():
            proxy.refuse()
            proxy.drop_connections(reset=True)

        return go_away


class TestS3OnSeaweed(OnS3, BackendConformance):
    pass


class TestS3InPartsOnSeaweed(OnS3, RaceTests, *(LONG and (ValueTests, BufferTests))):
    """Values over 5 MiB by ranges and multipart uploads."""

    options: ClassVar = {"whole_bytes": 5 << 20, "part_bytes": 5 << 20}
    race_bytes = 6 << 20
    listing_entries = 30

    @pytest.fixture
    def folder(self, folder):
        return f"a folder/än other/{folder}"


class TestS3OnMoto(OnS3, *(LONG and (LifecycleTests, BufferTests, ListingTests)), ValueTests):
    listing_entries = 210

    @pytest.fixture
    def server(self, moto):
        return moto


class TestS3ThroughTheClientOnSeaweed(OnS3, *(LONG and (ValueTests,)), BufferTests):
    options: ClassVar = {"data_path": "aioboto3"}
    race_bytes = 256 << 10
    large_bytes = 1 << 20
    listing_entries = 30


class TestS3JournalOnSeaweed(JournalConformance):
    def context(self):
        return patient_context()

    @pytest.fixture
    def make_backend(self, server, folder):
        return lambda: server.backend("shared", prefix=folder)


@pytest.mark.skipif(not LONG, reason="set KVTIER_LONG=1")
class TestS3JournalOnMoto(TestS3JournalOnSeaweed):
    @pytest.fixture
    def server(self, moto):
        return moto

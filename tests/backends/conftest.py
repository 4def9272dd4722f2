"""A context as a store would lend it, and paths of entries on disk."""

import pytest

from kvtier.backends.disk_layout import ENTRIES, shard_of, shard_path
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject


@pytest.fixture
async def context():
    async with lend_context() as context:
        yield context


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def entry_path(root):
    def path_of(name):
        return root.joinpath(ENTRIES, *shard_path(shard_of(name)), name)

    return path_of


@pytest.fixture
async def disk(root, context):
    """An open local-disk backend on `root`."""
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    subject = Subject(backend)
    yield subject
    await backend.aclose()
    subject.assert_buffers_untouched()

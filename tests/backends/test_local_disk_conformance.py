"""The shipped kit against the local-disk backend."""

from pathlib import Path

import pytest

from kvtier.backends.disk_layout import ENTRIES, shard_of, shard_path
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.testing.backends import BackendConformance, JournalConformance


def entry_path(root: Path, name: str) -> Path:
    return root.joinpath(ENTRIES, *shard_path(shard_of(name)), name)


class TestLocalDisk(BackendConformance):
    large_bytes = 64 << 20
    listing_entries = 2_500

    @pytest.fixture
    def make_backend(self, tmp_path):
        return lambda: LocalDiskBackend(path=tmp_path / "root")

    @pytest.fixture
    def raw_read(self, tmp_path):
        def read(name):
            path = entry_path(tmp_path / "root", name)
            return path.read_bytes() if path.exists() else None

        return read

    @pytest.fixture
    def make_unopenable(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        return lambda: LocalDiskBackend(path=tmp_path / "file")

    @pytest.fixture
    def break_medium(self, monkeypatch):
        def fail(*args, **kwargs):
            raise OSError(5, "Input/output error")

        return lambda: [monkeypatch.setattr(f"os.{name}", fail) for name in ("open", "stat", "scandir")]


class TestLocalDiskSynced(BackendConformance):
    """With `fsync`, on fewer bytes."""

    race_bytes = 256 << 10
    large_bytes = 1 << 20
    listing_entries = 100

    @pytest.fixture
    def make_backend(self, tmp_path):
        return lambda: LocalDiskBackend(path=tmp_path, fsync=True)


class TestLocalDiskJournal(JournalConformance):
    @pytest.fixture
    def make_backend(self, tmp_path):
        return lambda: LocalDiskBackend(path=tmp_path)

"""What local-disk leaves on the file system, and what it does with what others left there."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.backends.base import Read, Write
from kvtier.backends.disk_layout import shard_of
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.errors import BackendError, ConfigError, InvalidKeyError, InvalidValueError, RacedError
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject


def modes_below(top):
    return {
        str(path.relative_to(top)): stat.S_IMODE(path.stat().st_mode)
        for path in top.rglob("*")
        if not path.is_symlink()
    }


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
async def test_modes_do_not_depend_on_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        async with lend_context() as context:
            backend = LocalDiskBackend(path=tmp_path / "deep" / "root")
            await backend.open(context)
            await Subject(backend).put("entry", b"12345")
            await backend.append_journal(b"record")
            await backend.replace_journals(b"record")
            modes = modes_below(tmp_path)
            await backend.aclose()
    finally:
        os.umask(before)
    assert len(modes) > 8
    files = {path for path in modes if (tmp_path / path).is_file()}
    gone = {path for path in modes if path.startswith("deep/root/owners/")}  # removed at close
    for path, mode in modes.items():
        expected = 0o600 if path in files or path.endswith("lock") else 0o700
        assert mode == expected, f"{path} has mode {mode:o}"
    assert len(gone) == 2


async def test_a_directory_that_exists_keeps_its_mode(tmp_path, context):
    tmp_path.chmod(0o750)
    backend = LocalDiskBackend(path=tmp_path)
    await backend.open(context)
    await backend.aclose()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("relative/path", "relative"),
        ("{tmp}/file", "Not a directory"),
        ("{tmp}/file/below", "Not a directory"),
        ("{tmp}/loop", "symbolic links"),
    ],
)
async def test_wrong_paths_are_config_errors(tmp_path, context, path, words):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    backend = LocalDiskBackend(path=Path(path.format(tmp=tmp_path)))
    with pytest.raises(ConfigError, match=words) as caught:
        await backend.open(context)
    assert "path=" in str(caught.value)
    await backend.aclose()


UNWRITABLE = """
import asyncio, os, sys
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.errors import ConfigError
from kvtier.testing.context import lend_context

async def main():
    async with lend_context(arena_bytes=4096) as context:
        backend = LocalDiskBackend(path=sys.argv[1])
        try:
            await backend.open(context)
        except ConfigError as exc:
            print("refused:", exc)
        await backend.aclose()

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
asyncio.run(main())
"""


def test_unwritable_directory_is_a_config_error(tmp_path):
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    sealed.chmod(0o555)
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        if parent.owner() == sealed.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    for path in (sealed, sealed / "below"):
        run = subprocess.run([sys.executable, "-c", UNWRITABLE, str(path)], capture_output=True, text=True, check=False)
        assert "refused: path=" in run.stdout, run.stdout + run.stderr
        assert "Permission denied" in run.stdout


async def test_open_twice_is_refused(disk, context):
    with pytest.raises(ConfigError, match="open already"):
        await disk.backend.open(context)


@pytest.mark.parametrize("mark", [b"kvtier-disk 2\n", b"something else"])
async def test_other_formats_are_refused(root, context, mark):
    root.mkdir()
    (root / "kvtier-format").write_bytes(mark)
    backend = LocalDiskBackend(path=root)
    with pytest.raises(ConfigError, match="kvtier-disk 1"):
        await backend.open(context)
    await backend.aclose()
    assert (root / "kvtier-format").read_bytes() == mark


async def test_format_is_marked_once(disk, root):
    assert (root / "kvtier-format").read_bytes() == b"kvtier-disk 1\n"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "A", "a\0b", "ä", "a b", "-a", "z" * 121])
async def test_names_that_are_none_are_refused(disk, root, name):
    before = modes_below(root.parent)
    backend = disk.backend
    for call in (
        backend.read_many([Read(name, [])]),
        backend.write_many([Write(name, [])]),
        backend.delete_many([name]),
        backend.stat_many([name]),
        backend.set_expiry_many([(name, None)]),
    ):
        with pytest.raises(InvalidKeyError):
            await call
    assert modes_below(root.parent) == before


async def test_planted_links_lead_nowhere(disk, root, tmp_path, entry_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (outside / "secret").chmod(0o644)
    await disk.put("victim", b"12345")
    path = entry_path("victim")
    path.unlink()
    path.symlink_to(outside / "secret")
    assert await disk.get("victim", 100) is None
    assert await disk.stat("victim") is None
    await disk.backend.set_expiry_many([("victim", 5e9)])
    assert await disk.delete("victim") is False
    assert await disk.listing() == []
    assert (await disk.put("victim", b"new", if_absent=True)).stored
    assert await disk.get("victim", 100) == b"new"
    assert not path.is_symlink()
    path.unlink()
    path.symlink_to(outside / "created")
    assert (await disk.put("victim", b"newer")).stored
    assert not (outside / "created").exists()
    assert (outside / "secret").read_bytes() == b"secret"
    assert (outside / "secret").stat().st_mtime > 1e9
    assert (outside / "secret").stat().st_mtime < 5e9


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_planted_directory_links_lead_nowhere(disk, root, tmp_path, entry_path, level):
    outside = tmp_path / "outside"
    await disk.put("victim", b"12345")
    victim = [root / "entries", entry_path("victim").parent.parent, entry_path("victim").parent][level]
    victim.rename(outside)
    victim.symlink_to(outside, target_is_directory=True)
    before = modes_below(outside)
    assert await disk.get("victim", 100) is None
    assert await disk.delete("victim") is False
    with pytest.raises(BackendError):
        await disk.put("victim", b"new")
    assert modes_below(outside) == before
    assert next(path for path in outside.rglob("*victim") if path.is_file()).read_bytes() == b"12345"


async def test_what_is_not_a_file_is_a_miss(disk, entry_path):
    for name, plant in (("pipe", os.mkfifo), ("directory", os.mkdir)):
        await disk.put(name, b"x")
        entry_path(name).unlink()
        plant(entry_path(name))
        assert await disk.get(name, 10) is None
        assert await disk.stat(name) is None
        assert await disk.delete(name) is False
    assert await disk.listing() == []
    assert (await disk.put("pipe", b"new")).stored
    with pytest.raises(BackendError):
        await disk.put("directory", b"new")


async def test_foreign_files_are_ignored(disk, root, entry_path):
    await disk.put("entry", b"12345")
    leaf = entry_path("entry").parent
    elsewhere = next(name for name in (f"n{i}" for i in range(100)) if shard_of(name) != shard_of("entry"))
    upper = next(name for name in (f"N{i}" for i in range(100_000)) if shard_of(name) == shard_of("entry"))
    for foreign in (leaf / upper, leaf / ".hidden", leaf / elsewhere, root / "notes.txt", leaf.parent / "zz"):
        foreign.write_bytes(b"foreign")
    assert [stat.name for stat in await disk.listing()] == ["entry"]
    assert await disk.get(elsewhere, 10) is None
    await disk.backend.aclose()
    assert (root / "notes.txt").exists()
    assert (leaf / elsewhere).exists()


async def test_entry_that_vanished_is_a_miss(disk, entry_path):
    await disk.put("entry", b"12345")
    entry_path("entry").unlink()
    assert await disk.get("entry", 10) is None
    assert await disk.stat("entry") is None
    assert await disk.delete("entry") is False
    await disk.put("entry", b"again")
    assert await disk.get("entry", 10) == b"again"


async def test_root_that_was_emptied_is_filled_again(disk, root):
    await disk.put("entry", b"12345")
    await disk.backend.append_journal(b"lost")
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert await disk.get("entry", 10) is None
    assert (await disk.put("entry", b"again")).stored
    assert await disk.get("entry", 10) == b"again"
    await disk.backend.append_journal(b"kept")
    assert await disk.backend.read_journals() == [b"kept"]
    assert len(list(root.glob("owners/*/lock"))) == 1


async def test_write_starts_again_if_the_root_is_emptied_under_it(disk, root, monkeypatch):
    rename, emptied = os.rename, []

    def empty_first(*args, **kwargs):
        if not emptied:
            emptied.append(shutil.rmtree(root / "entries") or shutil.rmtree(root / "owners"))
        rename(*args, **kwargs)

    monkeypatch.setattr("os.rename", empty_first)
    assert (await disk.put("entry", b"12345")).stored
    assert emptied
    assert await disk.get("entry", 10) == b"12345"


async def test_file_that_shrinks_under_the_reader_is_raced(disk, monkeypatch):
    await disk.put("entry", b"x" * 1000)
    real = os.fstat

    def too_long(fd):
        return os.stat_result((*real(fd)[:6], 2000, *real(fd)[7:]))

    monkeypatch.setattr("os.fstat", too_long)
    with pytest.raises(RacedError):
        await disk.get("entry", 3000)


async def test_expiry_is_the_modification_time(disk, entry_path):
    await disk.put("mortal", b"x", expires=1_900_000_000.25)
    await disk.put("immortal", b"x")
    assert entry_path("mortal").stat().st_mtime_ns == 1_900_000_000_250_000_000
    assert entry_path("immortal").stat().st_mtime_ns == 0
    await disk.backend.set_expiry_many([("immortal", 2_000_000_000.0), ("mortal", None)])
    assert entry_path("immortal").stat().st_mtime_ns == 2_000_000_000_000_000_000
    assert entry_path("mortal").stat().st_mtime_ns == 0


@pytest.mark.parametrize(
    ("expires", "known"), [(-1e9, 1e-9), (0.0, 1e-9), (1e300, 13_569_465_600.0), (float("inf"), None)]
)
async def test_extreme_expiry_is_kept_in_range(disk, expires, known):
    await disk.put("entry", b"x", expires=expires)
    stat = await disk.stat("entry")
    assert stat.expires == (pytest.approx(known) if known is not None else None)


async def test_expiry_that_is_no_number_is_refused(disk):
    with pytest.raises(InvalidValueError):
        await disk.put("entry", b"x", expires=float("nan"))


async def test_changed_is_when_it_was_written(disk, context):
    before = context.clock.wall()
    await disk.put("entry", b"x", expires=5e9)
    stat = await disk.stat("entry")
    assert before - 1 <= stat.changed <= context.clock.wall() + 1


async def test_scan_goes_on_when_files_vanish_under_it(disk, root):
    await disk.put_all({f"n{i}": b"x" for i in range(3000)})
    scan = disk.backend.scan()
    assert 0 < len(await anext(scan)) < 100
    for path in root.glob("entries/*/*/n*"):
        path.unlink()
    assert sum([len(page) async for page in scan]) < 100  # what was read ahead


async def test_pages_are_bounded(disk, root, monkeypatch):
    monkeypatch.setattr("kvtier.backends.local_disk._PAGE_ENTRIES", 3)
    for module in ("disk_write", "disk_listing"):
        monkeypatch.setattr(f"kvtier.backends.{module}.shard_of", lambda name: 5)
    await disk.put_all({f"n{i}": b"x" for i in range(10)})
    assert [len(page) async for page in disk.backend.scan()] == [3, 3, 3, 1]


async def test_nothing_unfinished_stays(disk, root):
    await asyncio.gather(*(disk.put(f"n{i % 3}", b"x" * 1000, if_absent=i % 2 == 0) for i in range(30)))
    assert [path.name for path in root.glob("owners/*/*")] == ["lock"]
    await disk.backend.aclose()
    assert list(root.glob("owners/*")) == []


async def test_repr_names_the_path(root):
    shown = f"LocalDiskBackend(path={str(root)!r}, fsync=True, io='direct')"
    assert repr(LocalDiskBackend(path=root, fsync=True, io="direct")) == shown


def test_works_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import kvtier.backends.local_disk, kvtier.backends.pinned_cpu, "
        "kvtier.backends.bytes_backend, kvtier.chunk.container; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

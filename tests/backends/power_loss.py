"""A recorder of what a backend asks of the file system, and the directories that a power cut may make of it.

Durable is what was synced: a file's bytes and times by a sync of the file, a name by a sync of the directory it stands
in. Of everything else any part may be lost, whatever the order.
"""

import hashlib
import itertools
import os
import random
import stat
from dataclasses import dataclass, field
from pathlib import Path

MOST_SUBSETS = 12


@dataclass(frozen=True)
class Effect:
    what: str
    where: str = ""  # directory in which a name changes
    path: str = ""
    node: int = 0
    source: str = ""
    offset: int = 0
    content: bytes = b""
    mtime: int = 0


@dataclass
class Recorder:
    """Wraps `os` while it is installed; what happens outside `root` is not noted."""

    root: Path
    log: list = field(default_factory=list)
    nodes: dict = field(default_factory=dict)  # inode number -> number of the file
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))

    def install(self, monkeypatch):
        for name in (
            "open",
            "mkdir",
            "pwritev",
            "pwrite",
            "write",
            "utime",
            "fsync",
            "rename",
            "link",
            "unlink",
            "rmdir",
        ):
            monkeypatch.setattr(f"os.{name}", self._wrapped(name, getattr(os, name)))

    def ack(self, name, value):
        self.log.append(Effect("ack", path=name, content=value or b""))

    def begin(self, name):
        self.log.append(Effect("begin", path=name))

    def _wrapped(self, name, real):
        note = getattr(self, f"_{name}")

        def call(*args, **kwargs):
            before = self._source_of(name, args, kwargs)
            result = real(*args, **kwargs)
            note(result, before, *args, **kwargs)
            return result

        return call

    def _source_of(self, name, args, kwargs):
        """Return the file that a rename or link is about, while its old name still leads to it."""
        if name not in {"rename", "link"}:
            return None
        path = self._path(args[0], kwargs.get("src_dir_fd"))
        return (path, self.nodes.get(Path(path).stat().st_ino, 0)) if Path(path).exists() else (path, 0)

    def _path(self, name, dir_fd):
        return str(name) if dir_fd is None else f"{Path(f'/proc/self/fd/{dir_fd}').readlink()}/{name}"

    def _add(self, **fields):
        effect = Effect(**fields)
        if (effect.path or effect.where or str(self.root)).startswith(str(self.root)):
            self.log.append(effect)

    def _node(self, fd):
        status = os.fstat(fd)  # a directory may have the number of a file that is gone
        return 0 if stat.S_ISDIR(status.st_mode) else self.nodes.get(status.st_ino, 0)

    def _open(self, fd, _, name, flags, mode=0o777, *, dir_fd=None):
        if flags & os.O_EXCL:
            path = self._path(name, dir_fd)
            node = self.nodes[os.fstat(fd).st_ino] = next(self.numbers)
            self._add(what="create", path=path, where=str(Path(path).parent), node=node)

    def _mkdir(self, _, __, name, mode=0o777, *, dir_fd=None):
        path = self._path(name, dir_fd)
        self._add(what="mkdir", path=path, where=str(Path(path).parent))

    def _pwritev(self, count, _, fd, views, offset, *rest):
        content = b"".join(bytes(view) for view in views)[:count]
        if node := self._node(fd):
            self._add(what="write", node=node, offset=offset, content=content)

    def _pwrite(self, count, _, fd, content, offset):
        if node := self._node(fd):
            self._add(what="write", node=node, offset=offset, content=bytes(content[:count]))

    def _write(self, count, _, fd, content):
        if node := self._node(fd):
            self._add(
                what="write", node=node, offset=os.lseek(fd, 0, os.SEEK_CUR) - count, content=bytes(content[:count])
            )

    def _utime(self, _, __, target, times=None, *, ns=None, **kwargs):
        if isinstance(target, int) and (node := self._node(target)):
            self._add(what="mtime", node=node, mtime=ns[1])

    def _fsync(self, _, __, fd):
        if node := self._node(fd):
            self._add(what="sync", node=node)
        else:
            self._add(what="syncdir", where=str(Path(f"/proc/self/fd/{fd}").readlink()))

    def _rename(self, _, before, source, target, *, src_dir_fd=None, dst_dir_fd=None):
        path = self._path(target, dst_dir_fd)
        self._add(what="rename", source=before[0], node=before[1], path=path, where=str(Path(path).parent))

    def _link(self, _, before, source, target, *, src_dir_fd=None, dst_dir_fd=None, follow_symlinks=True):
        path = self._path(target, dst_dir_fd)
        self._add(what="link", source=before[0], node=before[1], path=path, where=str(Path(path).parent))

    def _unlink(self, _, __, name, *, dir_fd=None):
        path = self._path(name, dir_fd)
        self._add(what="unlink", path=path, where=str(Path(path).parent))

    def _rmdir(self, _, __, name, *, dir_fd=None):
        return


def is_durable(log, index, cut):
    """Tell whether an effect was synced before the cut."""
    effect = log[index]
    for later in log[index + 1 : cut]:
        if effect.what in {"write", "mtime"} and later.what == "sync" and later.node == effect.node:
            return True
        if effect.where and later.what == "syncdir" and later.where == effect.where:
            return True
    return False


def states(log, rng):
    """Yield (cut, kept effects) for every moment of the log, and for what may be left of it then."""
    changing = {"create", "mkdir", "write", "mtime", "rename", "link", "unlink"}
    for cut in range(len(log) + 1):
        made = [i for i in range(cut) if log[i].what in changing]
        durable = {i for i in made if is_durable(log, i, cut)}
        open_ones = [i for i in made if i not in durable]
        subsets = [set(), set(open_ones), *({i} for i in open_ones), *(set(open_ones) - {i} for i in open_ones)]
        if len(subsets) > MOST_SUBSETS:
            subsets = subsets[:2] + rng.sample(subsets[2:], MOST_SUBSETS // 2)
        subsets += [{i for i in open_ones if rng.random() < 0.5} for _ in range(4)]
        for subset in subsets:
            yield cut, [log[i] for i in made if i in durable or i in subset]


def build(effects, root, target):
    """Make the directory that these effects leave; return a digest of it, and the maker of its files."""
    directories, names, contents, mtimes = {str(root)}, {}, {}, {}
    for effect in effects:
        if effect.what == "mkdir":
            directories.add(effect.path)
        elif effect.what == "write":
            old = contents.get(effect.node, b"")
            end = effect.offset + len(effect.content)
            contents[effect.node] = old[: effect.offset].ljust(effect.offset, b"\0") + effect.content + old[end:]
        elif effect.what == "mtime":
            mtimes[effect.node] = effect.mtime
        elif effect.what == "unlink":
            names.pop(effect.path, None)
        elif effect.node:
            if effect.what == "rename" and names.get(effect.source) == effect.node:
                del names[effect.source]
            names[effect.path] = effect.node
    there = {
        d for d in directories if all(str(p) in directories for p in Path(d).parents if str(p).startswith(str(root)))
    }
    files = {p: n for p, n in names.items() if str(Path(p).parent) in there}
    shape = (sorted(there), sorted((p, contents.get(n, b""), mtimes.get(n, 1)) for p, n in files.items()))
    digest = hashlib.sha256(repr(shape).encode()).hexdigest()

    def make():
        for directory in sorted(there):
            (target / os.path.relpath(directory, root)).mkdir(exist_ok=True)
        for path, node in files.items():
            place = target / os.path.relpath(path, root)
            place.write_bytes(contents.get(node, b""))
            mtime = mtimes.get(node, 1)  # a time that was lost: long ago
            os.utime(place, ns=(mtime, mtime))

    return digest, make


def fixed_random():
    return random.Random(2)

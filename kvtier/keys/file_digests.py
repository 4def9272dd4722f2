"""SHA-256 of weight files, remembered in the user's cache folder as long as the files stay as they were."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT: Final = 1

_SETTLED_NS: Final = 2_000_000_000  # longer than the coarsest file time stamps in use


def user_cache_folder() -> Path:
    """Return where this library keeps things of its own.

    `KVTIER_CACHE_DIR`, else `kvtier` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`).
    """
    own = os.environ.get("KVTIER_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"  # the XDG rule: relative is ignored
    return caches / "kvtier"


class FileDigests:
    """Digests by path, valid while size, inode and both time stamps of the file are the same.

    The change time cannot be set by a program, so an edit that keeps size and modification time is seen. A file that
    changed within two seconds before it was read is not remembered: a further change might not show in its times.
    The memory is a hint: if it is lost, unreadable or not writable, files are read again.
    """

    def __init__(self, memory: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._memory = memory
        self._now_ns = now_ns
        self.files_read: int = 0

    def digest(self, path: Path) -> str:
        """Return the hex SHA-256 of the file's content.

        Raises:
            OSError: if it cannot be read, or changes while it is read.
        """
        path = path.resolve()
        state = _state(path)
        known = self._load().get(str(path))
        if isinstance(known, dict) and known.get("state") == state and _is_digest(known.get("sha256")):
            return str(known["sha256"])
        began = self._now_ns()
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        self.files_read += 1
        if _state(path) != state:
            raise OSError(f"{path} changed while it was read")
        if max(state[2], state[3]) < began - _SETTLED_NS:
            self._remember(str(path), state, found)
        return found

    def _load(self) -> dict[str, object]:
        try:
            stored = json.loads(self._memory.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        files = stored.get("files") if isinstance(stored, dict) and stored.get("format") == FORMAT else None
        return files if isinstance(files, dict) else {}

    def _remember(self, path: str, state: list[int], sha256: str) -> None:
        files = {**self._load(), path: {"state": state, "sha256": sha256}}
        with contextlib.suppress(OSError):  # a home that cannot be written costs reading again, nothing else
            _replace(self._memory, json.dumps({"format": FORMAT, "files": files}, indent=1))


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")  # noqa: PLR2004  # hex


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)  # rename is atomic: readers see the old or the new memory
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

"""One table per medium says which of our errors stands for a foreign one; nothing foreign leaves a backend."""

from __future__ import annotations

import errno
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, CapacityError, KVTierError

# Keys are exception classes, or `errno` numbers of an OSError; numbers win, then the first class that matches.
ForeignErrors = Mapping[type[Exception] | int, type[BackendError]]

# What any medium means by these; a backend's own table goes before it. An OSError with no entry of its own
# (EIO, EACCES, EROFS, ESTALE, EMFILE, ...) says that the medium cannot serve now.
COMMON: ForeignErrors = {
    errno.ENOSPC: CapacityError,
    errno.EDQUOT: CapacityError,
    errno.EFBIG: CapacityError,
    errno.ENOMEM: CapacityError,
    TimeoutError: BackendTimeoutError,  # ETIMEDOUT is one
    MemoryError: CapacityError,
    OSError: BackendUnavailableError,
}


def translated(exc: Exception, foreign: ForeignErrors, *, medium: str) -> BackendError | None:
    """Return the `BackendError` that stands for `exc`; `None` if no table knows it: a bug then, not a fault."""
    if isinstance(exc, BackendError):
        return exc
    for table in (foreign, COMMON):
        ours = table.get(exc.errno) if isinstance(exc, OSError) and exc.errno is not None else None
        if ours is None:
            ours = next((table[kind] for kind in table if isinstance(kind, type) and isinstance(exc, kind)), None)
        if ours is not None:
            return ours(f"{medium}: {_describe(exc)}")
    return None


def _describe(exc: Exception) -> str:
    kind, text = type(exc).__name__, str(exc)
    if not text:
        return kind
    return text if isinstance(exc, OSError) else f"{kind}: {text}"


@contextmanager
def translate(foreign: ForeignErrors, *, medium: str) -> Generator[None, None, None]:
    """Raise the `BackendError` that stands for a foreign exception from inside; others pass as they are."""
    try:
        yield
    except KVTierError:
        raise
    except Exception as exc:
        ours = translated(exc, foreign, medium=medium)
        if ours is None:
            raise
        raise ours from exc

"""Every exception kvtier raises, in one tree rooted at `KVTierError`.

A miss is a value (`None`, `False`, 0), never an exception. Storage faults become misses and events, unless the
store was opened with `strict=True`.
"""

from collections.abc import Sequence


class KVTierError(Exception):
    """Root of the tree: `except KVTierError` catches everything this library raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """The configuration is wrong; the message names the option, the value and the way out."""


class UnknownPluginError(ConfigError, LookupError):
    """No backend, codec or policy is registered under this name."""


class ClosedError(KVTierError, RuntimeError):
    """The store is closed, was opened in another process, or belongs to another event loop."""


class InvalidKeyError(KVTierError, ValueError):
    """A key, token sequence, salt or namespace that cannot be used; nothing was stored or read."""


class InvalidValueError(KVTierError, ValueError):
    """A value that cannot be stored as it is: wrong shape, length, dtype or kind."""


class LayoutMismatchError(InvalidValueError):
    """Tensors do not fit the store's `KVLayout`."""


class PartialDeleteError(KVTierError):
    """A delete reached some tiers only; the key is hidden in this store all the same.

    Attributes:
        tiers: names of the tiers that could not be reached.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        super().__init__(f"not deleted from tier(s) {', '.join(tiers)}; hidden in this store; delete again later")
        self.tiers: tuple[str, ...] = tuple(tiers)


class BackendError(KVTierError):
    """A storage medium failed."""


class BackendUnavailableError(BackendError, ConnectionError):
    """The medium cannot be reached, refuses access, or is out of service."""


class BackendTimeoutError(BackendError, TimeoutError):
    """The medium did not answer in time."""


class CapacityError(BackendError):
    """The medium is full, or the value is larger than it takes.

    Attributes:
        need: bytes that have to go before the value fits; 0 if nobody can tell.
    """

    def __init__(self, message: str, *, need: int = 0) -> None:
        super().__init__(message)
        self.need: int = need


class RacedError(BackendError):
    """The entry was replaced or recycled by another process while it was read; a later read may succeed."""


class CodecError(KVTierError):
    """Bytes that a codec cannot decode, or a value it cannot encode."""


class CorruptChunkError(CodecError):
    """A stored entry failed verification: magic, version, key, namespace, lengths or checksum."""


class UnsupportedModelError(KVTierError, TypeError):
    """The KV of this model, cache or call cannot be stored by prefix; an adapter refuses rather than guesses."""


class UnsupportedCacheLayerError(UnsupportedModelError):
    """A cache layer has no per-token keys and values, or hides them; the message names the class."""

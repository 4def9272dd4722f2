"""What a server's replies mean to a tier, the errors above all."""

from __future__ import annotations

import re
from typing import Any, Final

from kvtier.errors import BackendError, BackendUnavailableError, CapacityError


class SpoiltError(BackendError):
    """What lies under an entry's key is nothing that was put there."""


# By the first word of the reply. What refuses writes alone is a `CapacityError`: reads go on, the breaker stays closed.
_KINDS: Final[dict[str, type[BackendError]]] = {
    "OOM": CapacityError,
    "MISCONF": CapacityError,
    "NOREPLICAS": CapacityError,
    "READONLY": CapacityError,
    "KVTFULL": CapacityError,
    "KVTLOST": CapacityError,  # the server evicts parts before their entry is whole: it has no room for it
    "LOADING": BackendUnavailableError,
    "MASTERDOWN": BackendUnavailableError,
    "CLUSTERDOWN": BackendUnavailableError,
    "TRYAGAIN": BackendUnavailableError,
    "BUSY": BackendUnavailableError,
    "NOAUTH": BackendUnavailableError,
    "WRONGPASS": BackendUnavailableError,
    "NOPERM": BackendUnavailableError,
    "DENIED": BackendUnavailableError,
    "UNBLOCKED": BackendUnavailableError,
    "WRONGTYPE": SpoiltError,
}
REFUSED: Final = frozenset({"NOAUTH", "WRONGPASS", "NOPERM", "DENIED"})  # wrong options, when it happens at open
NOT_MASTER: Final = frozenset({"READONLY", "MASTERDOWN", "CLUSTERDOWN"})  # the topology may have changed


_IN_SCRIPT: Final = re.compile(r"@user_script: ?\d+: -?([A-Z]{2,}) ")  # how Redis 6 wraps what a script's command says


class ReplyError(Exception):
    """A server's error reply: its first word and the text. Never leaves the backend."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        inner = _IN_SCRIPT.search(text)
        self.code: str = inner[1] if inner is not None else text.partition(" ")[0]

    def ours(self, medium: str) -> BackendError:
        """Return the `BackendError` that stands for it."""
        text = str(self)
        if self.code == "ERR" and "max number of clients" in text:
            return BackendUnavailableError(f"{medium}: {text}")
        return _KINDS.get(self.code, BackendError)(f"{medium}: {text}")


def spoilt(name: str) -> SpoiltError:
    """Return the error for a head that was not written by this backend, or is not as it was written."""
    return SpoiltError(f"{name}: no entry's head, or a damaged one")


class Redirected(Exception):  # noqa: N818  # no error: an answer that names another node
    """The key's slot is served elsewhere. Never leaves the backend.

    Attributes:
        host: of the node, "" for the host that answered.
        port: of the node.
        asking: for this one command only (`ASK`): the slot is on its way there.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        word, _slot, address = text.split(" ")[:3]
        host, _, port = address.rpartition(":")
        self.host: str = host
        self.port: int = int(port)
        self.asking: bool = word == "ASK"


def raise_reply(text: str) -> None:
    """Raise what an error reply stands for."""
    if text.startswith(("MOVED ", "ASK ")):
        raise Redirected(text)
    raise ReplyError(text)


def listed(reply: object, length: int) -> list[Any]:
    """Return a reply that must be an array of `length`; raise `BackendUnavailableError` for anything else."""
    if not isinstance(reply, list | tuple) or len(reply) != length:  # redis-py makes a pair of what `TIME` says
        raise BackendUnavailableError(f"a server's reply is no array of {length}")
    return list(reply)


def text_of(word: object) -> str:
    """Return a word of a reply as text."""
    return word.decode() if isinstance(word, bytes) else str(word)

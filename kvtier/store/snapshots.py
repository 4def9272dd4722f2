"""The copy that a put waits for: from the caller's memory into slots, in the first tier's form where that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.chunk.transfer import Copies
from kvtier.tier.encode import encode_from

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvtier.codecs.chain import CodecChain
    from kvtier.store.placing import Put
    from kvtier.tier.services import Services
    from kvtier.tier.value import Value


def take_snapshots(
    steps: CodecChain | None,
    services: Services,
    gate: AbstractContextManager[None],
    batch: Sequence[tuple[Put, Value]],
) -> None:
    """Fill each value from its put: encoded on the way if there are `steps` and the put has tensors, else raw."""
    copies = Copies()
    with gate:
        for put, value in batch:
            tensors = put.tensors() if put.tensors is not None else None
            if steps is not None and tensors is not None and encode_from(tensors, steps, value, services):
                continue
            value.slot.trim(value.size)
            if tensors is None:
                put.fill(value.views())
            else:
                for tensor, view in zip(tensors, value.views(), strict=True):
                    copies.add_in(tensor, view)
        copies.run()

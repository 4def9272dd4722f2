"""Small blocking stores, and a way to stop their loop."""

import threading

import pytest
import torch

import kvtier
from kvtier.testing.kv_values import Prompt, kv_of, same_bits

LAYOUT = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
NAMESPACE = kvtier.Namespace(model="org/model", revision="1")
CHUNK = 4


class Stopper:
    """Holds the loop's thread in a coroutine that does not await, until it is let go."""

    def __init__(self):
        self.stopped = threading.Event()
        self.go = threading.Event()

    async def block(self, _store, *, deadline_seconds):
        self.stopped.set()
        self.go.wait(60)

    def stop(self, store):
        future = store.submit(self.block, deadline_seconds=90)
        assert self.stopped.wait(30)
        return future


class Kit:
    layout, namespace, chunk = LAYOUT, NAMESPACE, CHUNK
    Stopper = Stopper

    def __init__(self, path):
        self.path = path

    def config(self, *, disk=False, **options):
        tiers = [{"backend": "pinned-cpu", "capacity": "16MiB"}]
        if disk:
            tiers.append({"backend": "local-disk", "path": str(self.path / "disk"), "capacity": "64MiB"})
        memory = {"staging_bytes": "4MiB", "results_bytes": "32MiB"}
        return {"chunk_tokens": CHUNK, "tiers": tiers, "memory": memory, "close_seconds": 10.0, **options}

    def open(self, *, disk=False, observer=None, strict=None, queue_calls=1024, **options):
        return kvtier.open_blocking(
            self.config(disk=disk, **options),
            layout=LAYOUT,
            namespace=NAMESPACE,
            observer=observer,
            strict=strict,
            queue_calls=queue_calls,
        )

    @staticmethod
    def kv(tokens, *, take=0):
        kv = kv_of(LAYOUT, Prompt(((tuple(tokens), ""),)), chunk_tokens=CHUNK, take=take)
        return next(iter(kv.values()))

    def assert_kv(self, found, tokens, *, take=0):
        for name, tensor in self.kv(tokens, take=take).items():
            assert same_bits(found[name], tensor), f"{name} holds other values"

    @staticmethod
    def paint(tokens, value=77):
        return {name: torch.full((2, tokens, 2, 8), value, dtype=torch.bfloat16) for name in "kv"}


@pytest.fixture
def kit(tmp_path):
    return Kit(tmp_path)


@pytest.fixture
def stopper():
    stopper = Stopper()
    yield stopper
    stopper.go.set()

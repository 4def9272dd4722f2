"""Time to the first token of a real model: its prompt computed, loaded from memory, and loaded from a cold disk."""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil
import tempfile
from typing import TYPE_CHECKING

import torch

import kvtier
from benchmarks.harness import Case, Figure, measure, parser, save, show
from kvtier.adapters.transformers import load_prefix, prefill
from kvtier.demo.conversation import system_prompt
from kvtier.demo.model import load, prepare
from kvtier.keys import user_cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIX = 16  # tokens behind the stored prefix, which the model computes in any case
GOALS = {"from pinned-cpu": 15.0, "from local-disk, cold": 10.0}  # at 2,048 tokens


class Bench:
    """A model, a prompt, and two stores of one tier each that hold all but the prompt's last tokens."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, folder: pathlib.Path, *, axes: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.model = model
        self.ids = ids
        self.folder = folder
        layout = kvtier.KVLayout.from_config(model.config, dtype=model.dtype, axes=axes)
        namespace = kvtier.Namespace.from_model(model)
        tiers = {
            "memory": {"backend": "pinned-cpu", "capacity": "2GiB"},
            "disk": {"backend": "local-disk", "path": str(folder), "capacity": "4GiB"},
        }
        self.stores = {
            name: kvtier.open({"tiers": [tier]}, namespace=namespace, layout=layout) for name, tier in tiers.items()
        }

    async def open(self) -> None:
        """Open both stores and fill them."""
        for store in self.stores.values():
            await store.__aenter__()
            await prefill(self.model, store, self.ids)
            await store.flush()

    async def close(self) -> None:
        """Close both stores."""
        for store in self.stores.values():
            await store.aclose()

    def computed(self) -> None:
        """Compute the whole prompt."""
        self._next_token(None, 0)

    def loaded(self, name: str) -> None:
        """Load the prefix and compute what is left."""
        got = self.loop.run_until_complete(load_prefix(self.model, self.stores[name], self.ids))
        if got.num_tokens != self.ids.shape[1] - SUFFIX:
            raise AssertionError(f"{got.num_tokens} tokens loaded")
        self._next_token(got.cache, got.num_tokens)

    def only_loaded(self, name: str) -> None:
        """Load the prefix, and no more."""
        self.loop.run_until_complete(load_prefix(self.model, self.stores[name], self.ids))

    def _next_token(self, cache: object, start: int) -> None:
        with torch.no_grad():
            self.model(self.ids[:, start:], cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()

    def forget(self) -> None:
        """Drop the disk's files from the page cache."""
        for path in (path for path in self.folder.rglob("*") if path.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def cases(self) -> list[Case]:
        """Return every case, the base first."""
        return [
            Case(name="computed", call=self.computed),
            Case(name="from pinned-cpu", call=lambda: self.loaded("memory")),
            Case(name="from local-disk, cold", call=lambda: self.loaded("disk"), prepare=self.forget),
            Case(name="load alone, pinned-cpu", call=lambda: self.only_loaded("memory")),
            Case(name="load alone, local-disk, cold", call=lambda: self.only_loaded("disk"), prepare=self.forget),
        ]


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/ttft.json`."""
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--tokens", type=int, default=2048, help="length of the stored prefix, whole chunks of 256")
    flags.add_argument("--axes", default="LHTD", choices=["LHTD", "LTHD"])
    flags.add_argument("--folder", type=pathlib.Path, default=None, help="where the disk tier goes")
    options = flags.parse_args(arguments)
    model, tokenizer = load(prepare(user_cache_folder(), print))
    words = tokenizer(system_prompt() * (1 + options.tokens // 1000)).input_ids
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    bench = Bench(model, torch.tensor([words[: options.tokens + SUFFIX]]), folder, axes=options.axes)
    try:
        bench.loop.run_until_complete(bench.open())
        goals = GOALS if options.tokens >= 2048 else None
        figures = measure(bench.cases(), base="computed", rounds=options.rounds, goals=goals)
        bench.loop.run_until_complete(bench.close())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(figures)
    if not options.no_save:
        save("ttft", figures, flags=vars(options), extra={"model": "SmolLM2-135M-Instruct, float32"})
    return figures


if __name__ == "__main__":
    main()

"""A prefix that loads from disk, or is saved to it, layer by layer while a real model computes.

The layout has a layer group for every few layers: the grain at which `stream(by="layer")` loads ahead and `put_layers`
saves behind. The first group is one layer, so that computing begins early. The goal: overlapped <= 1.1 x max(load,
compute) + one layer's compute; for saving, + one group's save. The model's thread is bound to one core, as engines bind
theirs, and all else to the others. Writes a timeline of one run.

"compute" stands on a prefix that was just loaded: what another core has written is not in this core's caches, and the
same computing takes longer than on a prefix this core has written itself ("compute, own prefix"). "beside plain reads"
is a control: the same files, read past the page cache by a thread of a few lines that checks and copies nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import pathlib
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import DynamicCache

import kvtier
from benchmarks.harness import RESULTS, Case, Figure, measure, parser, save, show
from kvtier.adapters.transformers.restore import fill_layer
from kvtier.demo.conversation import system_prompt
from kvtier.demo.model import load, prepare
from kvtier.keys import user_cache_folder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine, Sequence

    from transformers import PreTrainedModel

    from kvtier.store.layer_puts import LayerPuts

STEP_TOKENS = 256  # computed at a time, where a prefix is made
SAVING_ROUNDS = 7  # of seconds each
LARGE = 256 << 10
T = TypeVar("T")
Spans = dict[str, dict[int, tuple[float, float]]]


class Bench:
    """A model, a prefix on disk, and a few tokens behind it to compute."""

    def __init__(
        self, model: PreTrainedModel, ids: torch.Tensor, folder: pathlib.Path, *, options: argparse.Namespace
    ) -> None:
        self.model, self.ids, self.folder = model, ids, folder
        self.prefix = ids.shape[1] - options.suffix
        self.left: set[int] = options.left
        self.saved: int = options.chunk_tokens
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, daemon=True).start()
        self.buffer = mmap.mmap(-1, 64 << 20)
        self.spans: Spans = {"load": {}, "compute": {}}
        self.saving: Saving | None = None
        self.ready = [threading.Event() for _ in model.model.layers]
        self.begun: dict[int, float] = {}
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda *_, n=number: self._before(n))
            layer.register_forward_hook(lambda *_, n=number: self._after(n))
        config = model.config
        spec = kvtier.TensorSpec(config.num_key_value_heads, config.head_dim, str(model.dtype))
        lows = [0, *range(1, config.num_hidden_layers, options.group_layers), config.num_hidden_layers]
        groups = [
            kvtier.LayerGroup(f"from {low}", range(low, high), {"k": spec, "v": spec})
            for low, high in itertools.pairwise(lows)
        ]
        self.layout = kvtier.KVLayout(groups, axes="LHTD")
        # Two threads fill the one core that the model leaves; four take turns on it, and the GIL from the model.
        place = {"path": str(folder), "capacity": "4GiB", "io": "direct", "threads": 2 * len(self.left)}
        tier = {"backend": "local-disk", **place}
        self.store = kvtier.open(
            {"chunk_tokens": options.chunk_tokens, "tiers": [tier], "deadline_seconds": 60.0},
            namespace=kvtier.Namespace.from_model(model),
            layout=self.layout,
        )

    def _run_loop(self) -> None:
        """Run the loop on the cores that the model leaves; the store's threads inherit them from this one."""
        os.sched_setaffinity(0, self.left)
        self.loop.run_forever()

    def on_loop(self, work: Coroutine[object, object, T]) -> T:
        """Wait for a coroutine on the loop's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _before(self, number: int) -> None:
        self.ready[number].wait()
        self.begun[number] = time.perf_counter()

    def _after(self, number: int) -> None:
        self.spans["compute"][number] = (self.begun[number], time.perf_counter())
        if self.saving is not None:
            self.saving.computed(number)

    async def open(self) -> None:
        """Compute the prefix once and store it."""
        await self.store.__aenter__()
        for event in self.ready:
            event.set()
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            for low in range(0, self.prefix, STEP_TOKENS):
                high = min(low + STEP_TOKENS, self.prefix)
                self.model(self.ids[:, low:high], cache=cache, use_cache=True, logits_to_keep=1)
        kv = {
            group.name: {
                "k": torch.stack([cache.layers[i].keys[0] for i in group.layers]),
                "v": torch.stack([cache.layers[i].values[0] for i in group.layers]),
            }
            for group in self.layout.groups
        }
        await self.store.put(self.ids[0, : self.prefix], kv, wait="durable", deadline_seconds=120)
        self.files = [path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size > LARGE]
        self.whole = cache
        self.expected = self._forward(self._copy())

    def _copy(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self.whole.layers):
            cache.update(layer.keys, layer.values, number)
        return cache

    def _forward(self, cache: DynamicCache) -> torch.Tensor:
        with torch.no_grad():
            output = self.model(self.ids[:, self.prefix :], cache=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    async def _stream(self, cache: DynamicCache) -> None:
        """Bring layer after layer into the cache."""
        begin = time.perf_counter()
        async for part in self.store.stream(self.ids[0, : self.prefix], by="layer"):
            if part.layer is None or part.stop != self.prefix:
                raise AssertionError(f"layer {part.layer} holds {part.stop} tokens")
            # As the adapter does it: the cache views the store's recycled memory, and copies when it appends.
            fill_layer(cache.layers[part.layer], part.kv["k"][None], part.kv["v"][None], self.prefix)
            self.spans["load"][part.layer] = (begin, time.perf_counter())
            begin = time.perf_counter()
            self.ready[part.layer].set()

    def load(self) -> None:
        """Load, and no more."""
        self.on_loop(self._stream(DynamicCache(config=self.model.config)))

    def compute(self) -> None:
        """Compute on a prefix that is there."""
        self._forward(self.warm)

    def prepare_compute(self) -> None:
        """Have the prefix loaded."""
        self.warm = DynamicCache(config=self.model.config)
        self.on_loop(self._stream(self.warm))

    def prepare_own(self) -> None:
        """Have the prefix written by the model's core."""
        for event in self.ready:
            event.set()
        self.warm = self._copy()

    def one_after_the_other(self) -> None:
        """Load everything, then compute."""
        cache = DynamicCache(config=self.model.config)
        self.on_loop(self._stream(cache))
        self._check(self._forward(cache))

    def overlapped(self) -> None:
        """Compute each layer as soon as it is there."""
        cache = DynamicCache(config=self.model.config)
        loading = asyncio.run_coroutine_threadsafe(self._stream(cache), self.loop)
        self.ready[0].wait()  # the model asks layer 0 how long the prefix is
        self._check(self._forward(cache))
        loading.result()

    def beside_plain_reads(self) -> None:
        """Compute while a thread reads the same files into one warm buffer."""
        reading = threading.Thread(target=_read_all, args=(self.files, self.buffer, self.left))
        reading.start()
        self._forward(self.warm)
        reading.join()

    def prepare_beside(self) -> None:
        """Have the prefix in memory, and the files out of it."""
        self.forget()
        self.prepare_compute()

    def _check(self, logits: torch.Tensor) -> None:
        if not torch.equal(logits, self.expected):
            raise AssertionError("the logits differ")

    def forget(self) -> None:
        """Drop the disk's files from the page cache, and every layer."""
        for event in self.ready:
            event.clear()
        self.spans = {"load": {}, "compute": {}}
        for path in (path for path in self.folder.rglob("*") if path.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def cases(self) -> list[Case]:
        """Return the cases of loading, the base first."""
        return [
            Case(name="one after the other", call=self.one_after_the_other, prepare=self.forget),
            Case(name="load", call=self.load, prepare=self.forget),
            Case(name="compute", call=self.compute, prepare=self.prepare_compute),
            Case(name="compute, own prefix", call=self.compute, prepare=self.prepare_own),
            Case(name="compute beside plain reads", call=self.beside_plain_reads, prepare=self.prepare_beside),
            Case(name="overlapped", call=self.overlapped, prepare=self.forget),
        ]


class Saving:
    """The first chunks of a prompt, computed and put on disk durably; another prompt each time."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.ids = bench.ids[:, : bench.saved].clone()
        self.layers: LayerPuts | None = None
        self.cache = DynamicCache(config=bench.model.config)

    def cases(self) -> list[Case]:
        """Return the cases of saving, the base first."""
        return [
            Case(name="prefill, then save", call=self.one_after_the_other, prepare=self.prepare),
            Case(name="prefill", call=self.prefill, prepare=self.prepare),
            Case(name="save", call=self.save, prepare=self.prepare_save),
            Case(name="prefill, saved by layer", call=self.overlapped, prepare=self.prepare),
        ]

    def prepare(self) -> None:
        """Take a prompt that is not stored yet, with nothing computed."""
        for event in self.bench.ready:
            event.set()
        self.ids[0, 0] += 1
        self.cache = DynamicCache(config=self.bench.model.config)

    def prepare_save(self) -> None:
        """Have it computed."""
        self.prepare()
        self.prefill()

    def prefill(self) -> None:
        """Compute the prompt."""
        with torch.no_grad():
            self.bench.model(self.ids, cache=self.cache, use_cache=True, logits_to_keep=1)

    def save(self) -> None:
        """Put what was computed."""
        layers = self.cache.layers
        kv = {
            group.name: {
                "k": torch.stack([layers[i].keys[0] for i in group.layers]),
                "v": torch.stack([layers[i].values[0] for i in group.layers]),
            }
            for group in self.bench.layout.groups
        }
        put = self.bench.store.put(self.ids[0], kv, wait="durable", deadline_seconds=60)
        check_stored(self.bench.on_loop(put))

    def one_after_the_other(self) -> None:
        """Compute, then put."""
        self.prefill()
        self.save()

    def computed(self, number: int) -> None:
        """Give a layer to the put; called in the model's thread."""
        layer = self.cache.layers[number]
        kv = {"k": layer.keys[0], "v": layer.values[0]}
        if self.layers is not None:
            self.bench.loop.call_soon_threadsafe(self.layers.add, number, kv)

    async def _save_layers(self, begun: threading.Event, computed: asyncio.Event) -> None:
        async with self.bench.store.put_layers(self.ids[0], wait="durable", deadline_seconds=60) as layers:
            self.layers, self.bench.saving = layers, self
            begun.set()
            await computed.wait()
        check_stored(layers.result)

    def overlapped(self) -> None:
        """Put each layer group as soon as it is computed."""
        loop, begun, computed = self.bench.loop, threading.Event(), asyncio.Event()
        saving = asyncio.run_coroutine_threadsafe(self._save_layers(begun, computed), loop)
        begun.wait()
        self.prefill()
        self.bench.saving = None
        loop.call_soon_threadsafe(computed.set)
        saving.result()


def check_stored(result: kvtier.PutResult) -> None:
    """Raise unless every chunk was taken."""
    if result.count("dropped") or not result.chunks:
        raise AssertionError(result)


def _read_all(paths: Sequence[pathlib.Path], buffer: mmap.mmap, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [buffer], 0)
        os.close(descriptor)


def plot(spans: Spans, path: pathlib.Path) -> None:
    """Draw when each layer was loaded and computed."""
    import matplotlib as mpl  # noqa: PLC0415  # only for the plot

    mpl.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    start = min(begin for begin, _ in spans["load"].values())
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for place, (what, color) in enumerate((("load", "tab:blue"), ("compute", "tab:orange"))):
        for layer, (begin, end) in spans[what].items():
            axes.barh(layer + 0.4 * place, 1e3 * (end - begin), left=1e3 * (begin - start), height=0.38, color=color)
        axes.barh(0, 0, color=color, label=what)
    axes.set(xlabel="ms", ylabel="layer", title="A prefix from disk, layer by layer")
    axes.invert_yaxis()
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/layerwise.json` and `results/layerwise.svg`."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--tokens", type=int, default=2048, help="of the prefix")
    flags.add_argument("--suffix", type=int, default=32, help="tokens to compute")
    flags.add_argument("--group-layers", type=int, default=3, help="layers per group behind the first")
    flags.add_argument("--chunk-tokens", type=int, default=1024, help="also saved; so that an object has a few MB")
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    model_core, *left = sorted(os.sched_getaffinity(0))
    options.left = set(left) or {model_core}
    os.sched_setaffinity(0, {model_core})
    model, tokenizer = load(prepare(user_cache_folder(), print))
    ids = torch.tensor([(tokenizer(system_prompt()).input_ids * 9)[: options.tokens + options.suffix]])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, ids, pathlib.Path(folder), options=options)
        bench.on_loop(bench.open())
        figures = measure(bench.cases(), base="one after the other", rounds=options.rounds)
        figures += measure(Saving(bench).cases(), base="prefill, then save", rounds=min(SAVING_ROUNDS, options.rounds))
        bench.forget()
        bench.overlapped()
        spans = bench.spans
        bench.on_loop(bench.store.aclose())
    show(figures)
    seconds = {figure.name: figure.seconds for figure in figures}
    layer = statistics.median(end - begin for begin, end in spans["compute"].values())
    bound = 1.1 * max(seconds["load"], seconds["compute"]) + layer
    met = seconds["overlapped"] <= bound
    print(f"overlapped {seconds['overlapped']:.3f} s, bound {bound:.3f} s: {'met' if met else 'MISSED'}")
    one_group = seconds["save"] / len(bench.layout.groups)
    save_bound = 1.1 * max(seconds["prefill"], seconds["save"]) + one_group
    saved = seconds["prefill, saved by layer"]
    print(f"saved by layer {saved:.3f} s, bound {save_bound:.3f} s: {'met' if saved <= save_bound else 'MISSED'}")
    if not options.no_save:
        RESULTS.mkdir(exist_ok=True)
        plot(spans, RESULTS / "layerwise.svg")
        extra: dict[str, object] = {
            "prefix_bytes": bench.layout.bytes_per_token() * bench.prefix,
            "layer_seconds": layer,
            "bound_seconds": bound,
            "met": met,
            "saved_bytes": bench.layout.bytes_per_token() * bench.saved,
            "save_bound_seconds": save_bound,
            "save_met": saved <= save_bound,
        }
        save("layerwise", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()

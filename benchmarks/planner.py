"""Whether the planner chooses right: a real model's prefill against a real server behind links of many speeds."""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

import kvtier
from benchmarks.harness import Case, Figure, measure, parser, save, show
from kvtier.adapters.transformers import load_prefix, prefill
from kvtier.demo.conversation import system_prompt
from kvtier.demo.model import load, prepare
from kvtier.keys import user_cache_folder
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.servers.redis_servers import RedisServer, redis_program, valkey_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

SUFFIX = 16  # tokens behind the stored prefix, which the model computes in any case
BAND = 0.1  # around break-even either choice is right
SPEEDS = (0.25, 0.5, 0.75, 1.33, 2.0, 4.0)  # of the link, in proportion to the one that breaks even
GOALS = {"get with min_benefit_seconds, slow link": 0.95}


@dataclass(frozen=True, slots=True)
class Trial:
    """One question to the planner, and what both answers then took (seconds to the first token)."""

    tokens: int
    speed: float
    choice: str
    predicted_load_seconds: float
    predicted_recompute_seconds: float
    load_seconds: float
    recompute_seconds: float
    asked_seconds: float  # of a get with min_benefit_seconds=0, and of computing what it did not bring

    @property
    def near(self) -> bool:
        """Whether it hardly matters."""
        return abs(self.load_seconds / self.recompute_seconds - 1) <= BAND

    @property
    def right(self) -> bool:
        """Whether the quicker way was chosen."""
        return (self.choice == "load") == (self.load_seconds < self.recompute_seconds)


class Bench:
    """A model, prompts of several lengths in a Redis tier, and a proxy that sets the speed of the link to it."""

    def __init__(
        self, model: PreTrainedModel, words: Sequence[int], lengths: Sequence[int], port: int, *, chunk: int
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.model = model
        self.ids = {n: torch.tensor([[7 + n, *words[: n + SUFFIX - 1]]]) for n in lengths}  # no prefix in common
        self.proxy = FaultProxy(("127.0.0.1", port))
        self.proxy.start()
        self.layout = kvtier.KVLayout.from_config(model.config, dtype=model.dtype, axes="LHTD")
        tier = {
            "backend": "redis",
            "url": f"redis://127.0.0.1:{self.proxy.port}",
            "prefix": "planner",
            "capacity": "2GiB",
            "deadline_seconds": 60.0,
            "max_in_flight": 4,
        }
        self.store = kvtier.open(
            {"chunk_tokens": chunk, "tiers": [tier], "deadline_seconds": 60.0, "close_seconds": 30.0},
            namespace=kvtier.Namespace.from_model(model),
            layout=self.layout,
        )
        self.prefills: list[tuple[int, float]] = []
        self.suffix = 0.0  # seconds

    async def open(self) -> None:
        """Open the store and fill it."""
        _ = await self.store.__aenter__()
        for ids in self.ids.values():
            await prefill(self.model, self.store, ids)
        await self.store.flush()

    def computed(self, n: int) -> float:
        """Return the seconds to the first token when everything is computed."""
        began = time.perf_counter()
        self._forward(self.ids[n], None)
        return time.perf_counter() - began

    def loaded(self, n: int) -> float:
        """Return the seconds to the first token when the prefix is loaded."""
        began = time.perf_counter()
        got = self.loop.run_until_complete(load_prefix(self.model, self.store, self.ids[n]))
        if got.num_tokens != n:
            raise AssertionError(f"{got.num_tokens} of {n} tokens loaded")
        self._forward(self.ids[n][:, n:], got.cache)
        return time.perf_counter() - began

    def asked(self, n: int) -> float:
        """Return the seconds to the first token when only what pays is loaded."""
        began = time.perf_counter()
        loading = load_prefix(self.model, self.store, self.ids[n], max_tokens=n, min_benefit_seconds=0.0)
        got = self.loop.run_until_complete(loading)
        self._forward(self.ids[n][:, got.num_tokens :], got.cache)
        return time.perf_counter() - began

    def _forward(self, ids: torch.Tensor, cache: object) -> None:
        with torch.no_grad():
            self.model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()

    def calibrate(self) -> float:
        """Tell the store what the prefix adds to a prefill; return the bytes per second of a link that breaks even."""
        self.suffix = min(self._suffix() for _ in range(3))  # computed in any case
        for n in self.ids:
            self._learn(n, self.computed(n))
        middle = statistics.median(n / seconds for n, seconds in self.prefills[-len(self.ids) :])
        return middle * self.layout.bytes_per_token()

    def _learn(self, n: int, seconds: float) -> None:
        """Fit the model of the prefill to the latest measurements."""
        self.prefills.append((n, max(seconds - self.suffix, 1e-3)))
        if len(self.prefills) >= len(self.ids):
            self.store.prefill = kvtier.Prefill.fit(self.prefills[-3 * len(self.ids) :])

    def _suffix(self) -> float:
        began = time.perf_counter()
        self._forward(next(iter(self.ids.values()))[:, :SUFFIX], None)
        return time.perf_counter() - began

    def link(self, bytes_per_second: float) -> None:
        """Set the speed of the link, and let the store see it in a few reads, as its traffic would."""
        self.proxy.replies = Fault(bytes_per_second=bytes_per_second)
        for n in sorted(self.ids)[:2]:
            self.loaded(n)

    def trial(self, n: int, speed: float) -> Trial:
        """Ask about one length at the present speed of the link, and measure all ways beside it."""
        plan = self.loop.run_until_complete(self.store.plan(self.ids[n][0], max_tokens=n))
        recompute, took = self.computed(n), self.loaded(n)
        asked = self.asked(n)
        recompute = (recompute + self.computed(n)) / 2  # before and after: the machine may be drifting
        self._learn(n, recompute)
        choice = "load" if plan.load_tokens == n else plan.choice if not plan.load_tokens else "part"
        trial = Trial(n, speed, choice, plan.load_seconds, plan.recompute_seconds, took, recompute, asked)
        ways = f"load {took:.3f} s, recompute {recompute:.3f} s, asked {asked:.3f} s"
        print(f"{n:5} tokens, link x {speed:4}: {choice:9} {ways}", flush=True)
        return trial

    def trials(self, *, rounds: int, until: float) -> Iterator[Trial]:
        """Yield a trial of every length at every speed of the link, `rounds` times or until the time is up."""
        for _ in range(rounds):
            breaking_even = self.calibrate()  # anew: the machine may have become slower or faster
            for speed in SPEEDS:
                self.link(speed * breaking_even)
                for n in self.ids:
                    if time.monotonic() > until:
                        return
                    yield self.trial(n, speed)

    def slow(self, n: int, *, rounds: int) -> list[Figure]:
        """Compare asking the planner with always computing, on a link a tenth as fast as would break even."""
        self.link(0.1 * self.calibrate())
        cases = [
            Case(name="always computed", call=lambda: self.computed(n)),
            Case(name="get with min_benefit_seconds, slow link", call=lambda: self.asked(n)),
        ]
        return measure(cases, base="always computed", rounds=rounds, goals=GOALS)


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/planner.json`."""
    flags = parser(__doc__, rounds=3)
    flags.add_argument("--lengths", default="256,512,768", help="prompt lengths, whole chunks")
    flags.add_argument("--chunk-tokens", type=int, default=256)
    flags.add_argument("--slow-rounds", type=int, default=7)
    flags.add_argument(
        "--seconds", type=float, default=330.0, help="for the trials; those that do not fit are left out"
    )
    options = flags.parse_args(arguments)
    program = redis_program() or valkey_program()
    if program is None:
        sys.exit("no Redis server here")
    lengths = [int(word) for word in options.lengths.split(",")]
    model, tokenizer = load(prepare(user_cache_folder(), print))
    words = tokenizer(system_prompt() * (1 + max(lengths) // 1000)).input_ids
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, RedisServer(program, pathlib.Path(folder)) as server:
        bench = Bench(model, words, lengths, server.port, chunk=options.chunk_tokens)
        bench.loop.run_until_complete(bench.open())
        trials: list[Trial] = []
        for trial in bench.trials(rounds=options.rounds, until=time.monotonic() + options.seconds):
            trials.append(trial)
            if not options.no_save:  # after each trial: a run that is cut short has told something
                save("planner", [], flags=vars(options), extra=_told(trials))
        figures = bench.slow(lengths[1], rounds=options.slow_rounds)
        bench.loop.run_until_complete(bench.store.aclose())
        bench.proxy.close()
    told = _told(trials)
    print(
        f"right in {told['right']:.1%} of {told['outside_the_band']} outside the band, {len(trials)} in all; goal 95 %"
    )
    print(f"asked / recompute by speed of the link: {told['asked_to_recompute']}")
    show(figures)
    if not options.no_save:
        save("planner", figures, flags=vars(options), extra=told)
    return figures


def _told(trials: Sequence[Trial]) -> dict[str, object]:
    """Return what the trials come to."""
    telling = [trial for trial in trials if not trial.near]
    ratios = {
        speed: [trial.asked_seconds / trial.recompute_seconds for trial in trials if trial.speed == speed]
        for speed in SPEEDS
    }
    return {
        "right": sum(trial.right for trial in telling) / max(len(telling), 1),
        "outside_the_band": len(telling),
        "asked_to_recompute": {speed: round(statistics.median(all_), 3) for speed, all_ in ratios.items() if all_},
        "trials": [asdict(trial) | {"near": trial.near, "right": trial.right} for trial in trials],
        "model": "SmolLM2-135M-Instruct, float32",
    }


if __name__ == "__main__":
    main()

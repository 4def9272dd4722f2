"""Interleaved rounds, ratios to a base case, and results that say on which machine and with which flags."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULTS = pathlib.Path(__file__).parent / "results"
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to time: `call` moves `size` bytes (0: it is timed per call); `prepare` is not timed.

    The first call behind a full collection, as each one is, finds the processor's caches cold. For what takes
    microseconds that is most of the time, so `calls` in a row may be asked for: their mean counts. Where `tells` is
    set, the call is another program's run, and what it returns are the seconds that this measured itself.
    """

    name: str
    call: Callable[[], object]
    size: int = 0
    prepare: Callable[[], object] | None = None
    calls: int = 1
    tells: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What came of one case. Ratios are speeds relative to the base case of the same round: above 1 is faster."""

    name: str
    seconds: float  # median
    gigabytes_per_second: float | None
    ratio: float  # median over the rounds
    ratio_lower_quartile: float
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """The median reaches the goal and the lower quartile 0.9 of it; None without a goal."""
        if self.goal is None:
            return None
        return self.ratio >= self.goal and self.ratio_lower_quartile >= 0.9 * self.goal


def measure(
    cases: Sequence[Case], *, base: str, rounds: int, goals: dict[str, float] | None = None, seed: int = 1
) -> list[Figure]:
    """Time every case once per round, in a new order each round, after one round that is not counted."""
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in rng.sample(cases, len(cases)):
            taken = _time(case)
            if number:
                seconds[case.name].append(taken)
    sizes = {case.name: case.size for case in cases}
    per_unit = {name: [taken / (sizes[name] or 1) for taken in all_taken] for name, all_taken in seconds.items()}
    figures = []
    for name, values in per_unit.items():
        ratios = [reference / value for reference, value in zip(per_unit[base], values, strict=True)]
        median = statistics.median(seconds[name])
        figures.append(
            Figure(
                name=name,
                seconds=median,
                gigabytes_per_second=sizes[name] / median / 1e9 if sizes[name] else None,
                ratio=statistics.median(ratios),
                ratio_lower_quartile=statistics.quantiles(ratios, n=4)[0],
                goal=(goals or {}).get(name),
            )
        )
    return figures


def _time(case: Case) -> float:
    if case.prepare is not None:
        case.prepare()
    gc.collect()
    gc.disable()
    try:
        if case.tells:
            told = case.call()
            assert isinstance(told, float)  # noqa: S101  # so the case says
            return told
        begin = time.perf_counter()
        for _ in range(case.calls):
            case.call()
        return (time.perf_counter() - begin) / case.calls
    finally:
        gc.enable()


def fill(view: memoryview, *, seed: int) -> None:
    """Fill `view` with bytes that no compressor shrinks and no other seed repeats."""
    whole = len(view) // 8 * 8
    generator = torch.Generator().manual_seed(seed)
    torch.frombuffer(view[:whole], dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    view[whole:] = random.Random(seed).randbytes(len(view) - whole)


def show(figures: Sequence[Figure]) -> None:
    """Print the figures as a table."""
    width = max(len(figure.name) for figure in figures)
    print(f"{'case':{width}}  {'median':>10}  {'GB/s':>6}  {'ratio':>6}  {'q1':>6}  goal")
    for figure in figures:
        speed = f"{figure.gigabytes_per_second:6.2f}" if figure.gigabytes_per_second is not None else "      "
        goal = "" if figure.goal is None else f"{figure.goal:.2f} {'met' if figure.met else 'MISSED'}"
        ratios = f"{figure.ratio:6.2f}  {figure.ratio_lower_quartile:6.2f}"
        print(f"{figure.name:{width}}  {_human(figure.seconds):>10}  {speed}  {ratios}  {goal}")


def _human(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def save(
    name: str,
    figures: Sequence[Figure],
    *,
    flags: dict[str, object],
    extra: dict[str, object],
    folder: pathlib.Path = RESULTS,
) -> None:
    """Write `<folder>/<name>.json`: the figures, how they were made, and what `extra` adds."""
    folder.mkdir(exist_ok=True)
    report = {
        "benchmark": name,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "flags": flags,
        "machine": machine(),
        "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
        **extra,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"written: {path if folder != RESULTS else f'benchmarks/results/{path.name}'}")


def machine() -> dict[str, object]:
    """Say what the run stood on; the load tells how far to trust it."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return answer.stdout.strip() or "unknown"


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the flags all benchmarks share."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{pathlib.Path(sys.argv[0]).stem}", description=description
    )
    made.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds, at least 7 for a result to count")
    made.add_argument("--no-save", action="store_true", help="print only")
    return made

"""What codecs do to a real model: the table and the plot of docs/concepts/codecs.md.

    python -m benchmarks.codec_quality [--model FOLDER] [--texts prose code chat german] [--context 1024] [--turns]

Without `--model` the demo's SmolLM2-135M-Instruct is used. Any folder with a transformers checkpoint will do, Gemma's
too, whose licence you have to accept yourself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmarks.field_schemes import FIELD
from benchmarks.harness import RESULTS, machine
from kvtier.codecs.bf16_split import Bf16SplitCodec
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.int4 import Int4Codec, K5V4Codec
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.zstd import ZstdCodec
from kvtier.demo.model import load, prepare
from kvtier.keys import user_cache_folder
from kvtier.testing.codec_quality import CHUNK, KV, TEXTS, Judge, Quality, restored, token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from kvtier.codecs.base import Codec

OURS: dict[str, list[Codec]] = {
    "bf16-split": [Bf16SplitCodec()],
    "int8": [Int8Codec()],
    "int8 + zstd": [Int8Codec(), ZstdCodec()],
    "fp8": [Fp8Codec()],
    "k5v4": [K5V4Codec()],
    "k5v4 + zstd": [K5V4Codec(), ZstdCodec()],
    "int4": [Int4Codec()],
    "int4 + zstd": [Int4Codec(), ZstdCodec()],
}
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3-270m": "Gemma-3-270M"}  # of the page, by their results' names
TURNS = 10
TURN_TOKENS = 24
PLOT = pathlib.Path(__file__).parent.parent / "docs" / "concepts" / "codecs.svg"
PAGE = PLOT.with_suffix(".md")
MOST = 256  # tokens judged behind the context
LEAST = 64  # likewise, also of a short text


def field(kv: KV, name: str) -> tuple[KV, float]:
    """Send KV through somebody else's scheme, chunk by chunk and layer by layer."""
    keys, values, bits = FIELD[name]
    parts = []
    for tensor, scheme in ((kv.k, keys), (kv.v, values)):
        out = torch.empty_like(tensor)
        for layer in range(tensor.shape[0]):
            for first in range(0, tensor.shape[1], CHUNK):
                piece = tensor[layer, first : first + CHUNK].transpose(0, 1).float()
                out[layer, first : first + CHUNK] = scheme(piece).transpose(0, 1).to(tensor.dtype)
        parts.append(out)
    return KV(*parts), bits


def judged(judge: Judge) -> dict[str, Quality]:
    """Return every scheme's quality on one text; a step that loses nothing is not judged twice."""
    found: dict[str, Quality] = {}
    for name in FIELD:
        found[name] = judge.judge(*field(judge.exact, name))
    for name, chain in OURS.items():
        kv, bits = restored(judge.exact, chain)
        base = found.get(name.partition(" + ")[0])
        if base is not None:
            found[name] = Quality(**{**asdict(base), "bits": bits})
        else:
            found[name] = judge.judge(kv, bits)
    return found


def accumulated(judge: Judge) -> dict[str, list[float]]:
    """Return the divergence after each of ten turns: restored before every turn, and encoded only once."""
    found = {}
    for name in ("int8", "k5v4", "int4"):
        qualities = judge.turns(TURNS, TURN_TOKENS, lambda kv, chain=OURS[name]: restored(kv, chain)[0])
        found[name] = [quality.kl for quality in qualities]
    return found


def show(results: dict[str, dict[str, Quality]]) -> str:
    """Return the table in Markdown: bits per number, divergence on each text, the worst of the rest."""
    texts = list(results)
    lines = [
        "| scheme | bits | " + " | ".join(f"KL {text}" for text in texts) + " | worst p99 | perplexity | same token |",
        "|---" * (len(texts) + 5) + "|",
    ]
    names = sorted(results[texts[0]], key=lambda name: -results[texts[0]][name].bits)
    for name in names:
        row = [results[text][name] for text in texts]
        ours = f"**`{name}`**" if name in OURS else name
        worst = max(row, key=lambda quality: abs(quality.perplexity - 1)).perplexity
        lines.append(
            f"| {ours} | {statistics.mean(q.bits for q in row):.2f} | "
            + " | ".join(f"{quality.kl:.1e}" for quality in row)
            + f" | {max(q.kl_p99 for q in row):.1e} | {100 * (worst - 1):+.2f} % "
            + f"| {100 * min(q.agreement for q in row):.1f} % |"
        )
    return "\n".join(lines)


def plot(reports: dict[str, dict[str, dict[str, Quality]]], path: pathlib.Path) -> None:
    """Draw the worst divergence over the texts against bits per number, one panel for each model."""
    import matplotlib as mpl  # noqa: PLC0415  # an extra

    mpl.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "kvtier"
    figure, panels = pyplot.subplots(len(reports), figsize=(8, 4.5 * len(reports)), sharex=True, squeeze=False)
    named = []
    for axes, (model, results) in zip(panels[:, 0], reports.items(), strict=True):
        points = {}
        for name in next(iter(results.values())):
            bits = statistics.mean(result[name].bits for result in results.values())
            worst = max(result[name].kl for result in results.values())
            if worst <= 0:
                continue
            ours = name in OURS
            axes.scatter(bits, worst, marker="o" if ours else "x", color="#3f51b5" if ours else "#888888")
            points[name] = (bits, worst)
        axes.set_title(MODELS[model], fontsize=10)
        axes.set_yscale("log")
        axes.set_xlim(2, 17)
        axes.set_ylabel("KL divergence, nats (worst text)")
        axes.grid(visible=True, alpha=0.3)
        named.append((axes, points))
    panels[-1, 0].set_xlabel("stored bits per number")
    figure.tight_layout()  # before the names: it moves the points
    for axes, points in named:
        write_names(axes, points)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_names(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write each point's name beside it, where it covers no other name and no point."""
    from matplotlib.transforms import Bbox  # noqa: PLC0415  # an extra

    at = {name: axes.transData.transform(point) for name, point in points.items()}
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in at.values()]
    for name, point in points.items():
        sides = (False, True) if name.endswith("+ zstd") else (True, False)  # it stands to the left of its codec
        for height, right in itertools.product((4, -3, -11, 12, -19, 20, -27, 28), sides):
            text = axes.annotate(
                name,
                point,
                xytext=(6 if right else -6, height),
                ha="left" if right else "right",
                textcoords="offset points",
                fontsize=8,
            )
            box = text.get_window_extent()
            if axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) and not box.count_overlaps(taken):
                break
            text.remove()
        else:
            raise ValueError(f"no room for the name {name!r}")
        taken.append(box)


def save(
    name: str, results: dict[str, dict[str, Quality]], turns: dict[str, list[float]], flags: dict[str, object]
) -> None:
    """Write `results/<name>.json`."""
    report = {
        "benchmark": name,
        "flags": flags,
        "machine": machine(),
        "texts": {
            text: {scheme: asdict(quality) for scheme, quality in found.items()} for text, found in results.items()
        },
        "kl_after_each_turn": turns,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1, default=str) + "\n")


def saved(name: str) -> tuple[dict[str, dict[str, Quality]], dict[str, list[float]]] | None:
    """Return what an earlier run found for a model, None if there was none."""
    path = RESULTS / f"codec_quality_{name}.json"
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    results = {
        text: {scheme: Quality(**values) for scheme, values in found.items()} for text, found in report["texts"].items()
    }
    return results, report["kl_after_each_turn"]


def write_page() -> None:
    """Put tables and turns between their marks on the page, and draw the plot beside it: from the saved results."""
    page = PAGE.read_text(encoding="utf-8")
    reports = {}
    for name in MODELS:
        report = saved(name)
        if report is None:
            continue
        results, turns = report
        reports[name] = results
        page = between(page, name, show(results))
        if turns:
            last = "| codec | " + " | ".join(str(turn) for turn in range(1, TURNS + 1)) + " |\n" + "|---" * (TURNS + 1)
            for codec, found in turns.items():
                last += ("|\n" if last.endswith("-") else "\n") + f"| `{codec}` | "
                last += " | ".join(f"{kl:.1e}" for kl in found) + " |"
            page = between(page, f"{name} turns", last)
    PAGE.write_text(page, encoding="utf-8")
    plot(reports, PLOT)


def between(page: str, mark: str, text: str) -> str:
    """Put `text` between a mark's two comments; a page without them stays as it is."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    if begin not in page:
        return page
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge, print, draw, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec_quality", description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="folder of another checkpoint")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    parser.add_argument("--context", type=int, default=1024, help="at most; a short text gets fewer chunks of it")
    parser.add_argument("--positions", type=int, default=MOST, help="judged behind the context, at most")
    parser.add_argument("--no-turns", action="store_true", help="leave out the ten turns")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--redraw", action="store_true", help="only write the page from the saved results")
    flags = parser.parse_args(arguments)
    if flags.redraw:
        write_page()
        return
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(2)
    model, tokenizer = load(flags.model or prepare(user_cache_folder(), print))
    model_name = "smollm2" if flags.model is None else flags.model.name
    results: dict[str, dict[str, Quality]] = {}
    turns: dict[str, list[float]] = {}
    for name in flags.texts:
        ids = token_ids(tokenizer, name, flags.context + flags.positions)
        context = min(flags.context, (ids.shape[1] - LEAST) // CHUNK * CHUNK)
        judge = Judge(model, ids[:, : context + flags.positions], context=context)
        results[name] = judged(judge)
        print(f"\n{name}\n{show({name: results[name]})}", flush=True)
        if not turns and not flags.no_turns:
            turns = accumulated(judge)
            print(f"KL after each of {TURNS} turns: {turns}", flush=True)
        if not flags.no_save:  # after each text: on a busy machine one takes minutes
            save(f"codec_quality_{model_name}", results, turns, {**vars(flags), "model": model_name})
    print("\n" + show(results))
    if not flags.no_save:
        write_page()


if __name__ == "__main__":
    main()

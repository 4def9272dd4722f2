"""A study's report: one picture, as PNG or inside an HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.errors import InvalidValueError


def write_report(path: Path, document: Mapping[str, object]) -> None:
    """Write the report to `path`, by its ending.

    Raises:
        InvalidValueError: neither .html nor .png, or matplotlib is not installed.
    """
    if path.suffix not in {".html", ".png"}:
        raise InvalidValueError(f"--report {str(path)!r}: end it in .html or .png")
    picture = _picture(document)
    path.write_bytes(picture if path.suffix == ".png" else _page(document, picture).encode())


def _picture(document: Mapping[str, object]) -> bytes:
    try:
        import matplotlib as mpl
    except ImportError:
        raise InvalidValueError("--report needs matplotlib; run: pip install 'kvtier[cli]'") from None
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (rates, times) = plt.subplots(1, 2, figsize=(12, 4.5))
    by_policy: dict[str, list[Mapping[str, object]]] = {}
    for result in _results(document):
        by_policy.setdefault(str(result["policy"]), []).append(result)
    for policy, results in by_policy.items():
        capacities = [result["capacity_blocks"] for result in results]
        rates.plot(capacities, [result["hit_rate"] for result in results], marker="o", label=policy)
        means = [result["ttft_seconds"]["mean"] for result in results if isinstance(result["ttft_seconds"], dict)]
        times.plot(capacities, means, marker="o", label=policy)
    first = next(iter(by_policy.values()))
    if all("optimum_hit_rate" in result for result in first):
        best = [result["optimum_hit_rate"] for result in first]
        rates.plot([result["capacity_blocks"] for result in first], best, "k--", label="optimum")
    for axes, label in ((rates, "hit rate"), (times, "modelled mean TTFT, seconds")):
        axes.set(xscale="log", xlabel="capacity in blocks", ylabel=label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    stream = io.BytesIO()
    figure.tight_layout()
    figure.savefig(stream, format="png", dpi=110)
    plt.close(figure)
    return stream.getvalue()


def _results(document: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    results = document["results"]
    return [result for result in results if isinstance(result, Mapping)] if isinstance(results, Sequence) else []


_COLUMNS = ("policy", "capacity_blocks", "hit_rate", "optimum_hit_rate", "share_of_optimum")


def _page(document: Mapping[str, object], picture: bytes) -> str:
    trace = document["trace"]
    facts = trace if isinstance(trace, Mapping) else {}
    about = "".join(f"<li>{html.escape(str(k))}: {html.escape(_text(v))}</li>" for k, v in facts.items())
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(result.get(name, '')))}</td>" for name in _COLUMNS) + "</tr>"
        for result in _results(document)
    )
    image = base64.b64encode(picture).decode()
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>kvtier simulate</title>"
        "<style>body{font:15px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}</style>"
        f"<h1>{html.escape(str(facts.get('name', 'trace')))}</h1><ul>{about}</ul>"
        f"<img alt='hit rate and TTFT over capacity' src='data:image/png;base64,{image}'>"
        f"<table><tr>{head}</tr>{rows}</table></html>\n"
    )


def _text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)

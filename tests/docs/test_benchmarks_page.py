"""The page of benchmarks shows every committed result, also where a goal is missed."""

import json

import pytest

from benchmarks import page
from benchmarks.harness import RESULTS, parser


def test_every_result_with_figures_has_a_table():
    text = page.tables()
    for path in RESULTS.glob("*.json"):
        figures = json.loads(path.read_text()).get("figures") or []
        assert all(f"| {figure['name']} |" in text for figure in figures), path


def test_a_goal_that_is_missed_is_shown(tmp_path):
    machine = {"cpu": "a", "cores": 2, "load_1min": 0.1}
    figure = {"name": "x", "gigabytes_per_second": 1.0, "ratio": 0.9, "ratio_lower_quartile": 0.9, "goal": 0.95}
    result = {"benchmark": "disk", "made": "2026-01-01", "commit": "c", "flags": {"gib": 1}, "machine": machine}
    (tmp_path / "disk.json").write_text(json.dumps({**result, "figures": [figure, {**figure, "ratio": 0.95}]}))
    rows = [line for line in page.tables(tmp_path).splitlines() if line.startswith("| x")]
    assert [row.split("|")[-2].strip() for row in rows] == ["missed", "met"]
    assert "`python -m benchmarks.disk --gib 1`" in page.tables(tmp_path)


@pytest.mark.parametrize("name", ["benchmarks.md", "alternatives.md"])
def test_the_pages_have_the_marks(name):
    text = (page.DOCS / name).read_text()
    assert text.index(page.BEGIN) < text.index(page.END)


def test_the_help_of_a_benchmark_shows_how_it_is_run_anywhere(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/disk.py"])
    assert parser(None, rounds=7).prog == "python -m benchmarks.disk"

"""Every query of the dashboard and of the alert rules asks for series that a scrape has."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from kvtier.metrics.prometheus import BREAKER_STATES, StoreCollector  # noqa: E402
from kvtier.metrics.requests import RequestMetrics  # noqa: E402
from kvtier.store import open_chunks  # noqa: E402

OPERATE = Path(__file__).parents[2] / "docs" / "operate"
WORDS = {
    *("sum", "by", "rate", "increase", "histogram_quantile", "tier", "result", "op", "le"),
    *("hit", "corrupt", "read", "loaded", "queue", "full", "__rate_interval"),
}


def dashboard_queries():
    panels = json.loads((OPERATE / "kvtier-dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_queries():
    groups = yaml.safe_load((OPERATE / "kvtier-alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.fixture
async def scrape(tmp_path):
    tiers = [
        {"backend": "pinned-cpu", "capacity": "1MiB"},
        {"backend": "local-disk", "path": str(tmp_path), "capacity": "1MiB"},
    ]
    async with open_chunks({"tiers": tiers}) as store:
        await store.put("a", b"1", wait="durable")
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        requests = RequestMetrics(registry)
        requests.observe(prompt_tokens=2, loaded_tokens=1, first_token_seconds=0.1)
        return generate_latest(registry).decode()


async def test_names_and_label_values_are_the_exported_ones(scrape):
    names = set(re.findall(r"^(kvtier_\w+)\{?", scrape, re.MULTILINE))
    names |= set(re.findall(r"^# TYPE (kvtier_\w+)", scrape, re.MULTILINE))
    values = set(re.findall(r'="([^"]+)"', scrape)) | {"queue-full"}  # a reason appears with its first drop
    queries = dashboard_queries() + alert_queries()
    assert len(queries) > 12
    for query in queries:
        asked = set(re.findall(r"kvtier_\w+", query))
        assert asked, query
        assert asked <= names, f"{asked - names} of {query!r} is not exported"
        assert set(re.findall(r'="([^"]+)"', query)) <= values, query


def test_panels_show_tiers_going_down_and_what_requests_gain():
    queries = " ".join(dashboard_queries())
    shown = ("kvtier_tier_up", "kvtier_breaker_state", "kvtier_first_token_seconds", "kvtier_prompt_tokens_total")
    assert [name for name in shown if name not in queries] == []


def test_panels_are_told_apart_and_do_not_overlap():
    panels = json.loads((OPERATE / "kvtier-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24


def test_every_state_of_a_breaker_has_a_word():
    panels = json.loads((OPERATE / "kvtier-dashboard.json").read_text())["panels"]
    (breakers,) = (panel for panel in panels if panel["targets"][0]["expr"] == "kvtier_breaker_state")
    (words,) = (mapping["options"] for mapping in breakers["fieldConfig"]["defaults"]["mappings"])
    assert {word["text"]: int(number) for number, word in words.items()} == BREAKER_STATES


def test_queries_are_made_of_known_functions_and_labels():
    for query in dashboard_queries() + alert_queries():
        words = set(re.findall(r"[a-z_]+", re.sub(r"kvtier_\w+|\[[^\]]*\]", "", query)))
        assert words <= WORDS, f"{words - WORDS} in {query!r}"
        assert query.count("(") == query.count(")")

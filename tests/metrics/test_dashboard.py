"""Every query of the dashboard and of the alert rules asks for series that a scrape has."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from kvtier.metrics.prometheus import StoreCollector  # noqa: E402
from kvtier.store import open_chunks  # noqa: E402

OPERATE = Path(__file__).parents[2] / "docs" / "operate"
WORDS = {
    *("sum", "by", "rate", "increase", "histogram_quantile", "tier", "result", "op", "le"),
    *("hit", "corrupt", "read", "queue", "full", "__rate_interval"),
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


def test_queries_are_made_of_known_functions_and_labels():
    for query in dashboard_queries() + alert_queries():
        words = set(re.findall(r"[a-z_]+", re.sub(r"kvtier_\w+|\[[^\]]*\]", "", query)))
        assert words <= WORDS, f"{words - WORDS} in {query!r}"
        assert query.count("(") == query.count(")")

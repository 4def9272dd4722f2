"""The how-to page tells every option and its default, and its TOML loads."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from kvtier import registry
from kvtier.config import MemoryConfig, StoreConfig, TierConfig, format_size, load_config
from kvtier.config.planner import PlannerConfig
from kvtier.config.plugins import options_model
from kvtier.config.schema import json_schema

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "configure.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \|\s*(.*?)\s*\| .+ \|$", re.MULTILINE)


def table(heading):
    """Return option and default of each row in the first table from `heading` on."""
    return dict(ROW.findall(PAGE.split(heading, 1)[1].split("|\n\n", 1)[0] + "|"))


def told(model, field):
    """Return how the page should give the default of `field`."""
    if field.is_required():
        return None
    if field.default is None or isinstance(field.default, MemoryConfig | PlannerConfig):
        return ""
    if type(field.default).__name__ == "PolicyConfig":
        return f"`{json.dumps(field.default.name)}`"
    value = field.default
    return f"`{json.dumps(format_size(value) if value.__class__ is int and value >= 1 << 20 else value)}`"


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("## Options of the store", StoreConfig),
        ("| option in `[memory]`", MemoryConfig),
        ("| option in `[planner]`", PlannerConfig),
        ("## Options of a tier", TierConfig),
    ],
)
def test_every_option_is_told_with_its_default(heading, model):
    rows = table(heading)
    assert list(rows) == list(model.model_fields)
    for name, field in model.model_fields.items():
        wanted = told(model, field)
        if wanted is None:
            assert rows[name] in {"required", "the backend's"}
        elif rows[name] != "the store's":
            assert rows[name] == wanted.replace("()", "[]"), name


def test_every_policy_is_told_with_its_options():
    part = PAGE.split("## Policies", 1)[1].split("On a published")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \|(.*)\|$", part, re.MULTILINE))
    assert sorted(rows) == list(registry.policies.names())
    for name, options in rows.items():
        assert set(re.findall(r"`([a-z_]+)`", options)) >= set(options_model(registry.policies.load(name)).model_fields)


def test_its_toml_loads(tmp_path):
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "kvtier.toml").write_text(block)
        assert load_config(tmp_path / "kvtier.toml").tiers
        assert tomllib.loads(block)


def test_the_schema_knows_the_plug_ins_and_their_options():
    schema = json_schema()
    variants = {
        tier["properties"]["backend"]["const"]: tier for tier in schema["properties"]["tiers"]["items"]["oneOf"]
    }
    assert set(variants) >= {"pinned-cpu", "local-disk"}
    disk = variants["local-disk"]
    assert disk["required"] == ["backend", "capacity", "path"]
    assert disk["additionalProperties"] is False
    assert set(disk["properties"]) >= {"path", "fsync", *TierConfig.model_fields}
    assert {"name": {"const": "zstd"}, "level": {"default": 1, "title": "Level", "type": "integer"}} in [
        codec.get("properties") for codec in schema["$defs"]["codec"]["anyOf"]
    ]
    text = json.dumps(schema)
    for reference in re.findall(r'"#/\$defs/(\w+)"', text):
        assert reference in schema["$defs"]


def test_the_schema_leaves_out_what_cannot_be_imported(register, monkeypatch):
    monkeypatch.setattr(registry.backends, "names", lambda: ("pinned-cpu", "no-such-thing"))
    variants = json_schema()["properties"]["tiers"]["items"]["oneOf"]
    assert [tier["properties"]["backend"]["const"] for tier in variants] == ["pinned-cpu"]


def test_sizes_in_the_schema_are_those_that_parse():
    capacity = json_schema()["properties"]["tiers"]["items"]["oneOf"][0]["properties"]["capacity"]
    pattern = re.compile(next(part["pattern"] for part in capacity["anyOf"] if "pattern" in part))
    for good in ("4GiB", "10 GB", " 5 kib ", "4096", "1.5MiB", "7B"):
        assert pattern.search(good)
    for bad in ("4G", "4 gigs", "-1", "GiB", "", "4GiBs"):
        assert not pattern.search(bad)

"""The config as a JSON schema, for editors that complete and check while typing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvtier import registry
from kvtier.config.choices import CodecConfig, PluginTable, PolicyConfig
from kvtier.config.plugins import options_model
from kvtier.config.store import StoreConfig
from kvtier.config.tier import TierConfig
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import BaseModel

Schema: TypeAlias = dict[str, object]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Schema:
    """Return the schema of a config file, with the options of every backend, codec and policy installed here.

    Imports all of them; one that cannot be imported, for want of its client library, is left out.
    """
    schema = _model_schema(StoreConfig)
    shared = _table(schema, "$defs")
    tiers = _alternatives(TierConfig, registry.backends.names(), registry.backends.load, shared)
    codecs = _alternatives(CodecConfig, registry.codecs.names(), registry.codecs.load, shared)
    policies = _alternatives(PolicyConfig, registry.policies.names(), registry.policies.load, shared)
    shared["codec"] = {"anyOf": [{"enum": list(registry.codecs.names())}, *codecs]}
    shared["policy"] = {"anyOf": [{"enum": list(registry.policies.names())}, *policies]}
    for name in ("TierConfig", "CodecConfig", "PolicyConfig"):
        shared.pop(name, None)
    _table(schema, "properties")["tiers"] = {"type": "array", "minItems": 1, "items": {"oneOf": tiers}}
    whole: Schema = {"$schema": DIALECT, **schema, "title": "kvtier"}
    _redirect(whole, {"#/$defs/CodecConfig": "#/$defs/codec", "#/$defs/PolicyConfig": "#/$defs/policy"})
    return whole


def _alternatives(
    table: type[PluginTable], names: Sequence[str], load: Callable[[str], type], shared: Schema
) -> list[Schema]:
    """Return one schema of `table` for each plug-in, its options among the properties."""
    variants = []
    for name in names:
        try:
            options = _model_schema(options_model(load(name)))
        except ConfigError:
            continue
        schema = _model_schema(table)
        shared.update(_table(options, "$defs"))
        shared.update(_table(schema, "$defs"))
        own = _table(schema, "properties") | {table.selector: {"const": name}}
        required = [*_names(schema), *_names(options)]
        variants.append(
            {
                "type": "object",
                "title": f"{table.selector} {name}",
                "properties": own | _table(options, "properties"),
                "required": [field for field in required if table is not TierConfig or field != "name"],
                "additionalProperties": False,
            }
        )
    return variants


def _redirect(part: object, targets: dict[str, str]) -> None:
    """Point references that name a class to the definition that knows its plug-ins."""
    if isinstance(part, dict):
        if part.get("$ref") in targets:
            part["$ref"] = targets[part["$ref"]]
        for item in part.values():
            _redirect(item, targets)
    elif isinstance(part, list):
        for item in part:
            _redirect(item, targets)


def _model_schema(model: type[BaseModel]) -> Schema:
    schema: Schema = model.model_json_schema()
    return schema


def _table(schema: Schema, name: str) -> Schema:
    part = schema.get(name, {})
    return part if isinstance(part, dict) else {}


def _names(schema: Schema) -> list[str]:
    names = schema.get("required", [])
    return [str(name) for name in names] if isinstance(names, list) else []

"""A config as plain data for people and files: every default filled in, sizes in human units, secrets masked."""

from __future__ import annotations

import pathlib

from kvtier.backends.base import Backend
from kvtier.config.choices import PluginTable
from kvtier.config.plugins import size_options
from kvtier.config.sizes import format_size
from kvtier.config.tables import Table
from kvtier.options import Secret


def plain(table: Table) -> dict[str, object]:
    """Return `table` as dicts, lists, texts and numbers; options that are not set are left out."""
    shown: dict[str, object] = {}
    for name in type(table).model_fields:
        value = getattr(table, name)
        if value is not None and value != {}:
            shown[name] = format_size(value) if name in table.sizes else _plain(value)
    if isinstance(table, PluginTable):
        shown |= _options(table)
    return shown


def _options(table: PluginTable) -> dict[str, object]:
    plugin = table.load_plugin(getattr(table, table.selector))
    if plugin is None:
        return {}
    sizes = size_options(plugin)
    return {
        name: format_size(value) if name in sizes and isinstance(value, int) else _plain(value)
        for name, value in table.options.items()
        if value is not None
    }


def _plain(value: object) -> object:
    if isinstance(value, PluginTable) and list(fields := plain(value)) == ["name"]:
        return fields["name"]
    if isinstance(value, Table):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Secret):
        return value.masked()
    if isinstance(value, pathlib.Path):
        return str(value)
    if isinstance(value, Backend):
        return f"<{type(value).__qualname__}>"
    return value if isinstance(value, str | int | float | bool) else repr(value)

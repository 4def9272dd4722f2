"""YAML as a config may use it: safe types only, and a key that is written twice is a mistake. Needs PyYAML."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader keeps the last of several equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:  # noqa: FBT001, FBT002  # PyYAML's signature
        seen: set[str] = set()
        for key, _value in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> object:
    """Return what the document says.

    Raises:
        ConfigError: it is not YAML, or writes a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source} is not YAML: {exc}") from exc

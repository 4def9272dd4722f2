"""Configuration: one schema for TOML, YAML and Python, every mistake named with its way out.

Importing this package imports pydantic; `import kvtier` does not import this package.
"""

from kvtier.config.choices import CodecConfig, PolicyConfig
from kvtier.config.load import default_config, load_config, reconcile
from kvtier.config.problems import InvalidConfigError, Problem
from kvtier.config.sizes import format_size, parse_size
from kvtier.config.store import MemoryConfig, NamespaceConfig, StoreConfig
from kvtier.config.tier import TierConfig

__all__ = [
    "CodecConfig",
    "InvalidConfigError",
    "MemoryConfig",
    "NamespaceConfig",
    "PolicyConfig",
    "Problem",
    "StoreConfig",
    "TierConfig",
    "default_config",
    "format_size",
    "load_config",
    "parse_size",
    "reconcile",
]

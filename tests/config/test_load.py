"""Where a config comes from: files, mappings, objects, nothing at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import StoreConfig, TierConfig, load_config, reconcile
from kvtier.errors import ConfigError
from kvtier.keys import user_cache_folder

TOML = """
chunk_tokens = 128
[namespace]
model = "org/name"
revision = "12fd25f"
[[tiers]]
backend = "pinned-cpu"
capacity = "64MiB"
[[tiers]]
backend = "local-disk"
path = "cache"
capacity = "50 GB"
policy = { name = "ttl", seconds = 60, inner = "arc" }
codecs = ["raw", { name = "zstd", level = 3 }]
"""
YAML = """
chunk_tokens: 128
namespace: {model: org/name, revision: 12fd25f}
tiers:
  - {backend: pinned-cpu, capacity: 64MiB}
  - backend: local-disk
    path: cache
    capacity: 50 GB
    policy: {name: ttl, seconds: 60, inner: arc}
    codecs: [raw, {name: zstd, level: 3}]
"""


def written(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_a_toml_file_says_what_it_says(tmp_path):
    config = load_config(written(tmp_path, "kvtier.toml", TOML))
    assert config.chunk_tokens == 128
    assert config.namespace is not None
    assert config.namespace.build().revision == "12fd25f"
    memory, disk = config.tiers
    assert (memory.name, memory.capacity, memory.policy.name) == ("pinned-cpu", 64 << 20, "lru")
    assert (disk.name, disk.capacity) == ("local-disk", 50 * 10**9)
    assert disk.options["path"] == tmp_path / "cache"
    assert [codec.name for codec in disk.codecs] == ["raw", "zstd"]
    assert disk.codecs[1].build().options() == {"level": 3}
    assert type(disk.policy.build()._inner).__name__ == "ARCPolicy"
    assert disk.build_backend().path == tmp_path / "cache"


@pytest.mark.parametrize("name", ["kvtier.yaml", "kvtier.yml", "KVTIER.YAML"])
def test_yaml_means_the_same(tmp_path, name):
    toml = load_config(written(tmp_path, "kvtier.toml", TOML))
    assert load_config(str(written(tmp_path, name, YAML))) == toml


def test_a_key_written_twice_in_yaml_is_refused(tmp_path):
    twice = YAML.replace("    path: cache", "    path: cache\n    path: other")
    with pytest.raises(ConfigError, match=r"'path' is written twice\s+in .*line 8"):
        load_config(written(tmp_path, "kvtier.yaml", twice))


def test_yaml_builds_no_objects(tmp_path):
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(written(tmp_path, "kvtier.yaml", "!!python/object/apply:os.system ['true']"))


def test_without_pyyaml_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "kvtier.config.yaml_text", raising=False)
    with pytest.raises(ConfigError, match=r"needs PyYAML: pip install 'kvtier\[yaml\]', or write it as TOML"):
        load_config(written(tmp_path, "kvtier.yaml", YAML))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("kvtier.toml", "tiers = ?", r"kvtier\.toml is not TOML: .*line 1"),
        ("kvtier.toml", "a = 1\na = 2", "is not TOML"),
        ("kvtier.yaml", "- 1\n- 2", r"holds list, not a table"),
        ("kvtier.yaml", "", r"holds NoneType, not a table"),
        ("kvtier.yaml", "a: [", "is not YAML"),
        ("kvtier.yaml", "1: 2", "key 1 is not a text"),
        ("kvtier.yaml", "tiers: [{backend: pinned-cpu, true: 2}]", r"tiers\[0\]: key True is not a text"),
        ("kvtier.ini", "x", r"neither \.toml nor \.yaml"),
        ("kvtier.toml", "chunk_tokens = 0", r"kvtier\.toml: 2 problems\n"),
    ],
)
def test_what_is_no_config_is_refused_with_its_file(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words):
        load_config(written(tmp_path, name, text))


def test_a_missing_file_names_those_that_are_there(tmp_path):
    written(tmp_path, "kvtier.toml", TOML)
    with pytest.raises(ConfigError, match=r"no config file '.*kvtire\.toml'; there are: kvtier\.toml"):
        load_config(tmp_path / "kvtire.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "nowhere" / "kvtier.toml")


def test_a_directory_and_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"a = '\xff'")
    for name in ("folder.toml", "latin.toml"):
        with pytest.raises(ConfigError, match=f"{name}' cannot be read"):
            load_config(tmp_path / name)


@pytest.mark.parametrize("config", [5, b"kvtier.toml", ["kvtier.toml"]])
def test_other_objects_are_no_configs(config):
    with pytest.raises(ConfigError, match="give a path, a mapping, a StoreConfig or None"):
        load_config(config)


def test_relative_paths_start_at_the_file_and_else_at_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "etc").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    tier = {"backend": "local-disk", "capacity": "1GiB", "path": "a/../cache"}
    assert load_config(written(tmp_path / "etc", "k.toml", TOML)).tiers[1].options["path"] == tmp_path / "etc" / "cache"
    assert load_config("../etc/k.toml").tiers[1].options["path"].resolve() == tmp_path / "etc" / "cache"
    assert load_config({"tiers": [tier]}).tiers[0].options["path"] == tmp_path / "work" / "a" / ".." / "cache"
    assert load_config(StoreConfig(tiers=[tier])).tiers[0].options["path"].is_absolute()


def test_a_home_directory_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = {"backend": "local-disk", "capacity": "1GiB", "path": "~/cache"}
    assert load_config({"tiers": [tier]}).tiers[0].options["path"] == tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.path = '~nobody-here/x': cannot be expanded"):
        load_config({"tiers": [tier | {"path": "~nobody-here/x"}]})


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"KVTIER_CACHE_DIR": "/own"}, "/own"),
        ({"KVTIER_CACHE_DIR": "~/own"}, "/home/me/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/kvtier"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/kvtier"),
        ({}, "/home/me/.cache/kvtier"),
    ],
)
def test_no_config_is_memory_and_disk_in_the_users_cache(monkeypatch, environment, path):
    for name in ("KVTIER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"HOME": "/home/me"}).items():
        monkeypatch.setenv(name, value)
    memory, disk = load_config().tiers
    assert (memory.backend, disk.backend) == ("pinned-cpu", "local-disk")
    assert disk.options["path"] == user_cache_folder() == Path(path)
    assert memory.capacity < disk.capacity


def test_a_loaded_config_may_be_loaded_again(tmp_path):
    config = load_config(written(tmp_path, "kvtier.toml", TOML))
    assert load_config(config) == config
    assert load_config(config.effective()) == config


def test_reading_a_config_twice_gives_equal_configs_and_shares_nothing(tmp_path):
    path = written(tmp_path, "kvtier.toml", TOML)
    one, two = load_config(path), load_config(path)
    assert one == two
    assert one.tiers[1].build_backend() is not two.tiers[1].build_backend()
    assert one.tiers[0].policy.build() is not one.tiers[0].policy.build()


@pytest.mark.parametrize(
    ("argument", "configured", "holds"), [(None, None, None), (1, None, 1), (None, 2, 2), (3, 3, 3), (0, None, 0)]
)
def test_an_argument_beats_a_config_that_says_nothing(argument, configured, holds):
    assert reconcile("chunk_tokens", argument, configured) == holds


def test_an_argument_and_a_config_that_disagree_raise():
    with pytest.raises(ConfigError, match=r"^chunk_tokens: the argument says 1, the config says 2; give one of them"):
        reconcile("chunk_tokens", 1, 2)
    with pytest.raises(ConfigError) as caught:
        reconcile("password", "hunter2", "hunter3")
    assert "hunter" not in str(caught.value)


def test_importing_kvtier_stays_free_of_pydantic_and_config_of_torch():
    script = (
        "import sys, kvtier.registry, kvtier.options, kvtier.policies.lru;"
        "assert 'pydantic' not in sys.modules;"
        "import kvtier.config; kvtier.config.load_config();"
        "assert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"HOME": "/tmp"})


def test_a_tier_written_in_python():
    tier = TierConfig(backend="pinned-cpu", capacity="1MiB", policy="lfu", write="back")
    assert (tier.capacity, tier.policy.name, tier.write) == (1 << 20, "lfu", "back")
    assert load_config(StoreConfig(tiers=(tier,))).tiers[0] == tier

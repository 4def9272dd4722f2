"""Case 40: every mistake in a configuration is told, with the option, the value and the way out; nothing is ignored."""

import re

import pytest

import kvtier
from kvtier.config import load_config
from kvtier.errors import ConfigError, UnknownPluginError

DISK = {"backend": "local-disk", "capacity": "1GiB"}
MEMORY = {"backend": "pinned-cpu", "capacity": "16MiB"}


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "option", "value", "way_out"),
    [
        ({"paht": "/x"}, "tiers[0].paht", "'/x'", "did you mean 'path'"),
        ({"polciy": "lru"}, "tiers[0].polciy", "'lru'", "did you mean 'policy'"),
        ({"Capacity": "1GiB"}, "tiers[0].Capacity", "'1GiB'", "did you mean 'capacity'"),
        ({"ttl": 5}, "tiers[0].ttl", "5", "ttl_seconds"),
        ({"ttl_seconds": -1}, "tiers[0].ttl_seconds", "-1", "greater than 0"),
        ({"codecs": ["zstandard"]}, "tiers[0].codecs[0].name", "'zstandard'", "known: zstd, "),
        ({"codecs": ["int8-not-installed"]}, "tiers[0].codecs[0].name", "'int8-not-installed'", "known: "),
        ({"policy": "lur"}, "tiers[0].policy.name", "'lur'", "known: lru"),
        ({"capacity": -1}, "tiers[0].capacity", "-1", '"4GiB"'),
        ({"capacity": 0}, "tiers[0].capacity", "0", '"4GiB"'),
        ({"capacity": True}, "tiers[0].capacity", "True", '"4GiB"'),
        ({"capacity": "10 gigabytes"}, "tiers[0].capacity", "'10 gigabytes'", '"4GiB"'),
        ({"capacity": "10G"}, "tiers[0].capacity", "'10G'", "10GiB"),
        ({"write": "around"}, "tiers[0].write", "'around'", "'through' or 'back'"),
        ({"deadline_seconds": float("inf")}, "tiers[0].deadline_seconds", "inf", "finite"),
        ({"path": 5}, "tiers[0].path", "5", "quotes"),
        ({"fsync": "true"}, "tiers[0].fsync", "'true'", "true nor false"),
    ],
)
def test_a_mistake_in_a_tier_is_named(tmp_path, changes, option, value, way_out):
    text = refusal({"tiers": [DISK | {"path": str(tmp_path)} | changes]})
    assert text.startswith(f"{option} = {value}: ")
    assert way_out in text


def test_an_unknown_tier_lists_the_known_ones_nearest_first(tmp_path):
    with pytest.raises(
        UnknownPluginError, match=r"tiers\[0\]\.backend = 'local_dsik': no backend 'local_dsik'; known: local-disk"
    ):
        load_config({"tiers": [DISK | {"backend": "local_dsik"}]})


@pytest.mark.parametrize("tiers", [[], {}, ()])
def test_an_empty_order_of_tiers_is_refused(tiers):
    assert "[[tiers]]" in refusal({"tiers": tiers})
    assert "tiers: is missing" in refusal({})


def test_a_capacity_that_is_missing_is_asked_for(tmp_path):
    text = refusal({"tiers": [{"backend": "local-disk", "path": str(tmp_path)}]})
    assert text == 'tiers[0].capacity: is missing; say how much the tier may hold, for example capacity = "4GiB"'


@pytest.mark.parametrize(
    ("text", "size"), [("10 GB", 10 * 10**9), ("10GiB", 10 * 2**30), ("10 gib", 10 * 2**30), (4096, 4096)]
)
def test_units_mean_what_is_documented(tmp_path, text, size):
    assert load_config({"tiers": [DISK | {"path": str(tmp_path), "capacity": text}]}).tiers[0].capacity == size


def test_a_duplicate_tier_name_is_refused(tmp_path):
    tier = DISK | {"path": str(tmp_path), "name": "disk"}
    assert refusal({"tiers": [tier, MEMORY, tier]}).startswith("tiers[2].name = 'disk': tiers[0] has this name too")


def test_a_relative_path_starts_at_the_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "kvtier.toml").write_text('[[tiers]]\nbackend = "local-disk"\ncapacity = "1GiB"\npath = "cache"\n')
    assert load_config("etc/kvtier.toml").tiers[0].options["path"] == folder / "cache"


def test_a_config_file_that_is_not_there_is_no_default(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "kvtier.toml")


def test_all_mistakes_are_told_at_once_and_those_right_beside_them_are_not(tmp_path):
    text = refusal(
        {
            "deadline_seconds": 0,
            "tiers": [MEMORY, DISK | {"path": str(tmp_path), "capacity": "x", "codecs": ["zstd", "y"], "polisy": 1}],
        }
    )
    assert re.findall(r"^  (\S+)", text, re.MULTILINE) == [
        "tiers[1].capacity",
        "tiers[1].codecs[1].name",
        "tiers[1].polisy",
        "deadline_seconds",
    ]


def test_the_effective_config_says_everything_and_loads_back(tmp_path):
    config = load_config({"tiers": [MEMORY, DISK | {"path": str(tmp_path)}]})
    shown = config.effective()
    assert shown["deadline_seconds"] == 5.0
    assert shown["tiers"][1]["path"] == str(tmp_path)
    assert shown["tiers"][1]["fsync"] is False
    assert load_config(shown) == load_config(shown | {"strict": False})


async def test_a_path_that_is_a_file_is_found_at_open(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file"):
        async with kvtier.open_chunks({"tiers": [MEMORY, DISK | {"path": str(tmp_path / "file")}]}):
            pass
    assert (tmp_path / "file").read_text() == "mine"


async def test_a_directory_that_cannot_be_written_is_found_at_open():
    with pytest.raises(ConfigError, match="/sys/kvtier"):  # not even root can make files there
        async with kvtier.open_chunks({"tiers": [MEMORY, DISK | {"path": "/sys/kvtier"}]}):
            pass


def test_a_tier_smaller_than_one_chunk_is_found_at_open():
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    namespace = kvtier.Namespace(model="org/name", revision="12fd25f")
    config = {"tiers": [MEMORY, MEMORY | {"name": "small", "capacity": "64KiB"}]}
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.capacity = '64KiB': holds not even one chunk of 256 tokens"):
        kvtier.open(config, layout=layout, namespace=namespace)


@pytest.mark.parametrize("backend", ["pinned-cpu", "local-disk"])
@pytest.mark.parametrize("open_it", ["open", "open_chunks"])
def test_memory_that_one_chunk_cannot_pass_through_is_found_at_open(tmp_path, backend, open_it):
    """Else everything is dropped for want of memory, put by put; half of it is for reads where no memory tier is."""
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    namespace = kvtier.Namespace(model="org/name", revision="12fd25f")
    options = {"layout": layout, "namespace": namespace} if open_it == "open" else {}
    chunk = 256 * 2 * 2 * 64 * 2 * 2 + 4096 if options else 4096
    least = chunk * (1 if backend == "pinned-cpu" else 2)
    tier = {"backend": backend, "capacity": "64MiB"} | ({"path": str(tmp_path)} if backend == "local-disk" else {})
    make = getattr(kvtier, open_it)
    make({"tiers": [tier], "memory": {"staging_bytes": least}}, **options)
    with pytest.raises(ConfigError, match=r"memory\.staging_bytes = .*at least"):
        make({"tiers": [tier], "memory": {"staging_bytes": least - 1}}, **options)


def test_an_argument_that_contradicts_the_config_is_refused():
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    config = {"tiers": [MEMORY], "namespace": {"model": "org/name", "revision": "12fd25f"}}
    other = kvtier.Namespace(model="org/name", revision="another")
    with pytest.raises(ConfigError, match=r"namespace: the argument says .*another.* the config says .*12fd25f"):
        kvtier.open(config, layout=layout, namespace=other)

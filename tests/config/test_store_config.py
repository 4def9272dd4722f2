"""What a config may say, and how it says what it may not."""

import inspect
import re

import pytest

from kvtier import registry
from kvtier.backends.base import Backend
from kvtier.config import (
    CodecConfig,
    InvalidConfigError,
    MemoryConfig,
    NamespaceConfig,
    PolicyConfig,
    StoreConfig,
    TierConfig,
    load_config,
)
from kvtier.errors import ConfigError, UnknownPluginError
from kvtier.options import Size
from kvtier.store import opening

MEMORY = {"backend": "pinned-cpu", "capacity": "1GiB"}
REMOTE = {"backend": "remote", "capacity": "1GiB", "url": "redis://host"}


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    return str(caught.value)


def test_defaults_are_those_of_the_docs():
    config = load_config({"tiers": [MEMORY]})
    tier = config.tiers[0]
    assert (config.chunk_tokens, config.deadline_seconds, config.close_seconds) == (256, 5.0, 10.0)
    assert (config.strict, config.lossless, config.memory.lease_share) == (False, False, 0.5)
    assert (tier.write, tier.promote, tier.required, tier.on_full) == ("through", "always", True, "drop")
    assert (tier.policy.name, tier.codecs, tier.ttl_seconds, tier.deadline_seconds) == ("lru", (), None, None)


def test_all_problems_are_told_at_once_each_on_its_line(remote):
    text = refusal(
        {
            "chunk_token": 1,
            "deadline_seconds": "5",
            "memory": {"lease_share": 2},
            "tiers": [
                MEMORY | {"polcy": "lru"},
                {"backend": "remote", "retries": "3", "codecs": ["zstd", {"name": "zstd", "levle": 3}]},
                {"backend": "flopy", "capacity": 0},
            ],
        }
    )
    lines = text.splitlines()
    assert lines[0] == "10 problems"
    for start in (
        "chunk_token = 1: unknown option; did you mean 'chunk_tokens'? known: chunk_tokens,",
        "deadline_seconds = '5': is not a number",
        "memory.lease_share = 2: must be less than or equal to 1",
        "tiers[0].polcy = 'lru': unknown option; did you mean 'policy'? known: policy,",
        "tiers[1].capacity: is missing; say how much the tier may hold",
        "tiers[1].url: is missing",
        "tiers[1].retries = '3': is not a whole number",
        "tiers[1].codecs[1].levle = 3: unknown option; did you mean 'level'? known: level, name",
        "tiers[2].backend = 'flopy': no backend 'flopy'; known: ",
        "tiers[2].capacity = 0: is not a size of at least 1 byte",
    ):
        assert any(line.strip().startswith(start) for line in lines), f"{start}\n\nnot in\n\n{text}"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("chunk_tokens", 0, "must be greater than or equal to 1"),
        ("chunk_tokens", 100_000, "must be less than or equal to 65536"),
        ("chunk_tokens", True, "is not a whole number"),
        ("chunk_tokens", 1.5, "is not a whole number"),
        ("deadline_seconds", 0, "must be greater than 0"),
        ("deadline_seconds", -1, "must be greater than 0"),
        ("deadline_seconds", float("inf"), "is not finite"),
        ("deadline_seconds", float("nan"), "is not finite"),
        ("deadline_seconds", True, "is not a number"),
        ("close_seconds", float("inf"), "is not finite"),
        ("strict", 1, "is neither true nor false"),
        ("strict", "yes", "is neither true nor false"),
        ("lossless", "false", "is neither true nor false"),
        ("threads", 0, "must be greater than or equal to 1"),
        ("memory", 5, "is not a table"),
        ("memory.results_bytes", "1 gig", "no unit"),
        ("memory.lease_share", 0, "must be greater than 0"),
        ("namespace", "org/name", "is not a table"),
        ("namespace.model", "", "must|String"),
        ("namespace.rope", "middle", "must be 'short' or 'long'"),
        ("namespace.revison", "abc", "did you mean 'revision'"),
        ("tiers", [], "is empty; add a [[tiers]] table"),
        ("tiers", {"backend": "pinned-cpu"}, "write [[tiers]] above each tier"),
        ("tiers", ["pinned-cpu"], "is not a table"),
        ("tiers", "pinned-cpu", "is not a list"),
    ],
)
def test_each_option_of_the_store_is_checked(option, value, words):
    table, _, name = option.rpartition(".")
    config = {"tiers": [MEMORY], "namespace": {"model": "m", "revision": "r"}, "memory": {}}
    (config[table] if table else config)[name] = value
    text = refusal(config)
    assert option.split(".", maxsplit=1)[0] in text
    assert any(word in text for word in words.split("|"))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("capacity", 0, "is not a size of at least 1 byte"),
        ("capacity", -1, "is not a size of at least 1 byte"),
        ("capacity", True, "is not a size"),
        ("name", "two words", "is no tier name"),
        ("name", "", "is no tier name"),
        ("name", 5, "is no tier name"),
        ("write", "bakc", "must be 'through' or 'back'"),
        ("promote", "sometimes", "must be 'always', 'never' or 'second-touch'"),
        ("on_full", None, "must be 'drop' or 'wait'"),
        ("required", "no", "is neither true nor false"),
        ("ttl_seconds", -5, "must be greater than 0"),
        ("ttl_seconds", 0, "must be greater than 0"),
        ("ttl_seconds", float("inf"), "is not finite"),
        ("deadline_seconds", 0, "must be greater than 0"),
        ("max_in_flight", 0, "must be greater than or equal to 1"),
        ("policy", "lur", "no policy 'lur'; known: lru"),
        ("policy", 3, "is neither a name nor a table"),
        ("policy", {"seconds": 5}, "policy.name: is missing"),
        ("policy", {"name": "ttl"}, "policy.seconds: is missing"),
        (
            "policy",
            {"name": "ttl", "seconds": 5, "inner": "acr"},
            "policy.inner.name = 'acr': no policy 'acr'; known: arc",
        ),
        ("policy", {"name": "s3-fifo", "small_share": 2.0}, "small_share is 2.0; write a share between 0 and 1"),
        ("policy", {"name": "gdsf", "cost": "token"}, "policy.cost = 'token': must be 'entry' or 'byte'"),
        ("policy", {"name": ["lru"]}, "policy.name = ['lru']: is not a text"),
        ("codecs", "zstd", "is not a list; write [...]"),
        ("codecs", ["ztsd"], "codecs[0].name = 'ztsd': no codec 'ztsd'; known: zstd"),
        ("codecs", [["zstd"]], "codecs[0] = ['zstd']: is neither a name nor a table"),
        ("codecs", [{"name": "zstd", "level": 99}], "codecs[0]: zstd: level is 99; give"),
        ("codecs", [{"name": "raw", "level": 1}], "codecs[0].level = 1: unknown option"),
        ("backend", "floppy", "no backend 'floppy'; known: "),
        ("backend", "", "is no backend; known: "),
        ("backend", None, "is no backend; known: "),
        ("url", 5, "is not a text; put it in quotes"),
        ("pool", "1 gig", "no unit"),
        ("pool", True, "is not a size"),
        ("spool", "", "is not a path; write it in quotes"),
        ("spool", "a\0b", "NUL"),
        ("linger", 0, "must be greater than 0"),
        ("retries", 1.5, "is not a whole number"),
        ("retries", True, "is not a whole number"),
        ("ratio", "half", "is not a number"),
        ("tls", 1, "is neither true nor false"),
        ("mode", "fastest", "must be 'fast' or 'safe'"),
        ("hosts", ["a", 5], "is not a text"),
        ("threshold", "maximum", "is not a whole number; or it must be 'auto'"),
        ("options", {"retries": 3}, "unknown option"),
    ],
)
def test_each_option_of_a_tier_is_checked(remote, option, value, words):
    text = refusal({"tiers": [MEMORY, REMOTE | {option: value}]})
    assert text.startswith(f"tiers[1].{option}"), text
    assert words in text
    assert len(text.splitlines()) == 1


def test_options_of_a_backend_arrive_with_their_types(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "pool": "2KiB",
        "spool": "s",
        "cache": "~/c",
        "linger": 2,
        "hosts": ["a", "b"],
        "threshold": 7,
        "mode": "fast",
    }
    monkeypatch.setenv("HOME", "/home/me")
    tier = load_config({"tiers": [REMOTE | given]}).tiers[0]
    backend = tier.build_backend()
    assert (backend.pool, backend.linger, backend.hosts, backend.threshold) == (2048, 2.0, ("a", "b"), 7)
    assert (str(backend.spool), str(backend.cache)) == (str(tmp_path / "s"), "/home/me/c")
    assert backend.url.reveal() == "redis://host"
    assert (backend.retries, backend.tls) == (3, False)
    assert tier.options["retries"] == 3


def test_an_instance_brings_its_own_options(remote):
    backend = remote(url="redis://host")
    config = load_config({"tiers": [{"backend": backend, "capacity": "1GiB"}]})
    assert config.tiers[0].build_backend() is backend
    assert config.tiers[0].name == "remote"
    assert config.effective()["tiers"][0]["backend"] == "<RemoteBackend>"
    text = refusal({"tiers": [{"backend": backend, "capacity": "1GiB", "retries": 3}]})
    assert text.startswith("tiers[0].retries = 3: unknown option")
    assert refusal({"tiers": [{"backend": remote, "capacity": 1}]}).startswith("tiers[0].backend = <class")


def test_two_tiers_of_one_backend_need_names():
    text = refusal({"tiers": [MEMORY, MEMORY]})
    assert text == "tiers[1].name = 'pinned-cpu': tiers[0] has this name too; give one of them another"
    names = [tier.name for tier in load_config({"tiers": [MEMORY, MEMORY | {"name": "second"}]}).tiers]
    assert names == ["pinned-cpu", "second"]


def test_lossless_refuses_lossy_chains(register):
    from tests.config.conftest import LossyCodec

    register("codecs", "lossy", LossyCodec)
    config = {"lossless": True, "tiers": [MEMORY, MEMORY | {"name": "b", "codecs": ["raw", "lossy"]}]}
    assert refusal(config).startswith("tiers[1].codecs[1] = 'lossy': loses precision, which lossless = true rules out")
    assert load_config(config | {"lossless": False}).tiers[1].lossy_codec == 1


def test_every_table_refuses_in_python_too():
    for build in (
        lambda: StoreConfig(tiers=[]),
        lambda: StoreConfig(tiers=[{"backend": "x"}], a=1),
        lambda: TierConfig(backend="pinned-cpu"),
        lambda: CodecConfig(name="x"),
        PolicyConfig,
        lambda: MemoryConfig(lease_share=3),
        NamespaceConfig,
        lambda: StoreConfig.model_validate({"tiers": []}),
        lambda: StoreConfig.model_validate(5),
    ):
        with pytest.raises(InvalidConfigError) as caught:
            build()
        assert caught.value.problems


def test_an_unknown_plug_in_is_that_kind_of_error():
    for config in ({"tiers": [MEMORY | {"backend": "floppy"}]}, {"tiers": [MEMORY | {"codecs": ["floppy"]}]}):
        with pytest.raises(UnknownPluginError):
            load_config(config)
    with pytest.raises(InvalidConfigError) as caught:
        load_config({"tiers": [MEMORY | {"capacity": 0}]})
    assert not isinstance(caught.value, UnknownPluginError)


def test_problems_are_there_for_programs(remote):
    with pytest.raises(InvalidConfigError) as caught:
        load_config({"tiers": [REMOTE | {"retries": "x"}], "strict": 3})
    assert [problem.path for problem in caught.value.problems] == ["tiers[0].retries", "strict"]


def test_configs_do_not_change():
    config = load_config({"tiers": [MEMORY]})
    with pytest.raises(Exception, match="frozen"):
        config.chunk_tokens = 1


def test_a_tier_smaller_than_a_chunk_is_named():
    config = load_config({"tiers": [MEMORY, MEMORY | {"name": "b", "capacity": "1KiB"}]})
    config.check_chunk_bytes(1024)
    with pytest.raises(
        ConfigError,
        match=r"^tiers\[1\]\.capacity = '1KiB': holds not even one chunk of 256 tokens; write at least 2KiB$",
    ):
        config.check_chunk_bytes(2048)


class Refusing(Backend):
    def __init__(self, *, port: int = 1) -> None:
        if port > 65535:
            raise ConfigError(f"port is {port}; write at most 65535")


def test_what_only_the_backend_knows_is_named_with_its_tier(register):
    register("backends", "refusing", type("R", (Refusing,), dict.fromkeys(Backend.__abstractmethods__)))
    config = load_config({"tiers": [{"backend": "refusing", "capacity": 1, "port": 70_000, "name": "mine"}]})
    with pytest.raises(ConfigError, match="tier 'mine': port is 70000; write at most 65535"):
        config.tiers[0].build_backend()


class ClashingBackend(Refusing):
    def __init__(self, *, capacity: int = 1) -> None: ...


class UnreadableBackend(Refusing):
    def __init__(self, *, when: "NotImported" = 1) -> None: ...  # noqa: F821


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (ClashingBackend, "capacity of .*ClashingBackend have names that"),
        (UnreadableBackend, "NotImported.*TYPE_CHECKING"),
    ],
)
def test_a_mistake_of_a_plug_ins_author_is_told_as_one(register, cls, words):
    register("backends", "theirs", cls)
    with pytest.raises(ConfigError, match=words):
        load_config({"tiers": [{"backend": "theirs", "capacity": 1}]})


def test_effective_shows_every_option_in_human_units_and_loads_back(remote):
    given = {"tiers": [REMOTE | {"pool": "2KiB", "codecs": ["zstd"], "ttl_seconds": 5}]}
    config = load_config(given)
    shown = config.effective()
    tier = shown["tiers"][0]
    assert (tier["capacity"], tier["pool"], tier["linger"], tier["retries"]) == ("1GiB", "2KiB", 1.5, 3)
    assert (tier["policy"], tier["codecs"], tier["ttl_seconds"]) == ("lru", [{"name": "zstd", "level": 1}], 5.0)
    assert load_config(shown).effective() == shown
    for table in (StoreConfig, TierConfig, MemoryConfig):
        byte_fields = {name for name in table.model_fields if name.endswith("_bytes") or name in {"capacity", "warm"}}
        assert byte_fields == table.sizes


def test_sizes_of_a_plug_in_are_shown_in_units(remote):
    assert Size.__metadata__
    assert load_config({"tiers": [REMOTE]}).effective()["tiers"][0]["pool"] == "1MiB"
    assert registry.backends.load("remote") is remote


def test_every_option_reaches_the_store():
    """An option that is accepted and then ignored is worse than none."""
    source = inspect.getsource(opening)
    for table in (StoreConfig, MemoryConfig, TierConfig):
        for field in table.model_fields:
            assert re.search(rf"\.{field}\b", source), f"{table.__name__}.{field} is read nowhere"

"""The registry against distributions made up on the spot: names without imports, clear errors, no clashes."""

import sys

import pytest

from kvtier import registry
from kvtier.codecs.base import Codec
from kvtier.codecs.raw import RawCodec
from kvtier.errors import ConfigError, UnknownPluginError
from kvtier.registry import Registry, nearest_first

MODULE = """
from kvtier.codecs.base import Codec
class Mine(Codec):
    name = "mine"
    def bound(self, size, spec): return size
    def encode(self, source, into, spec): return 0
    def decode(self, source, into, spec): return None
class Other(Mine): pass
NOT_A_CLASS = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that puts a distribution with these codec entry points on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(dist, entries, *, modules=()):
        for module in modules:
            (tmp_path / f"{module}.py").write_text(MODULE)
        folder = tmp_path / f"{dist}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries]
        (folder / "entry_points.txt").write_text("\n".join(["[kvtier.codecs]", *lines, ""]))

    yield put
    for module in ("plug_one", "plug_two"):
        sys.modules.pop(module, None)


def codecs():
    return Registry("kvtier.codecs", Codec)


def test_built_ins_are_entry_points_like_any_other():
    assert {"pinned-cpu", "local-disk"} <= set(registry.backends.names())
    assert {"raw", "zstd"} <= set(registry.codecs.names())
    assert registry.policies.names() == ("adaptive", "arc", "fifo", "gdsf", "lfu", "lru", "s3-fifo", "ttl")
    assert registry.codecs.load("raw") is RawCodec
    for name in registry.policies.names():
        assert registry.policies.load(name).name == name


def test_names_imports_nothing_and_load_imports_one(install):
    install("plug", [("mine", "plug_one:Mine"), ("other", "plug_two:Other")], modules=["plug_one", "plug_two"])
    found = codecs()
    assert {"mine", "other", "raw"} <= set(found.names())
    assert not {"plug_one", "plug_two"} & set(sys.modules)
    assert found.load("mine").__module__ == "plug_one"
    assert "plug_two" not in sys.modules


def test_an_unknown_name_lists_the_known_ones_nearest_first():
    with pytest.raises(UnknownPluginError, match=r"^no codec 'ztsd'; known: zstd, ") as caught:
        codecs().load("ztsd")
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, LookupError)


def test_nearest_first_forgives_case_and_underscores():
    assert nearest_first("LOCAL_DISK", ["aaa", "pinned-cpu", "local-disk"])[0] == "local-disk"


def test_a_package_installed_later_is_found(install):
    found = codecs()
    assert "mine" not in found.names()
    install("plug", [("mine", "plug_one:Mine")], modules=["plug_one"])
    assert found.load("mine").name == "mine"


def test_one_name_claimed_by_two_packages_names_both(install):
    install("alpha", [("mine", "plug_one:Mine")], modules=["plug_one"])
    install("beta", [("mine", "plug_one:Other")])
    with pytest.raises(ConfigError, match=r"codec 'mine' is claimed by alpha 1\.0 .* and beta 1\.0 .*uninstall one"):
        codecs().load("mine")


def test_one_class_named_twice_is_no_clash(install):
    install("alpha", [("mine", "plug_one:Mine")], modules=["plug_one"])
    install("beta", [("mine", "plug_one:Mine")])
    assert codecs().load("mine").name == "mine"


@pytest.mark.parametrize("attribute", ["NOT_A_CLASS", "Codec.name"])
def test_something_else_than_a_codec_is_refused(install, attribute):
    install("plug", [("mine", f"plug_one:{attribute}")], modules=["plug_one"])
    with pytest.raises(ConfigError, match=r"not a subclass of kvtier\.codecs\.base\.Codec|cannot be imported"):
        codecs().load("mine")


def test_a_class_of_another_kind_is_refused(install):
    install("plug", [("mine", "kvtier.policies.lru:LRUPolicy")])
    with pytest.raises(ConfigError, match=r"codec 'mine', provided by plug 1\.0 .*LRUPolicy.* not a subclass"):
        codecs().load("mine")


def test_a_missing_dependency_names_the_extra(install):
    install("plug", [("mine", "plug_that_needs_more:Mine [fast]")])
    with pytest.raises(ConfigError, match=r"No module named 'plug_that_needs_more'; try: pip install 'plug\[fast\]'"):
        codecs().load("mine")


def test_register_refuses_names_that_are_taken():
    class Mine(RawCodec):
        pass

    class Theirs(RawCodec):
        pass

    found = codecs()
    found.register("mine", Mine)
    found.register("mine", Mine)
    assert found.load("mine") is Mine
    assert "mine" in found.names()
    with pytest.raises(ConfigError, match=r"'mine' is registered already, as .*Mine; choose another name"):
        found.register("mine", Theirs)
    with pytest.raises(ConfigError, match=r"'raw' is provided by kvtier .* already"):
        found.register("raw", Mine)
    with pytest.raises(ConfigError, match="not a subclass of"):
        found.register("wrong", int)
    assert found.load("mine") is Mine


def test_registries_do_not_share_what_is_registered():
    first = codecs()
    first.register("mine", RawCodec)
    assert "mine" not in codecs().names()

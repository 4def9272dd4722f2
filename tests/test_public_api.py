"""The public names and signatures are the documented ones, and every public name is documented."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import kvtier
from kvtier import errors

ROOT = Path(__file__).parents[1]
REFERENCE = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
DOCUMENTED = re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE)

ERRORS = {
    "KVTierError": (Exception,),
    "ConfigError": (errors.KVTierError, ValueError),
    "UnknownPluginError": (errors.ConfigError, LookupError),
    "ClosedError": (errors.KVTierError, RuntimeError),
    "InvalidKeyError": (errors.KVTierError, ValueError),
    "InvalidValueError": (errors.KVTierError, ValueError),
    "LayoutMismatchError": (errors.KVTierError, ValueError),
    "PartialDeleteError": (errors.KVTierError,),
    "BackendError": (errors.KVTierError,),
    "BackendUnavailableError": (errors.BackendError, ConnectionError),
    "BackendTimeoutError": (errors.BackendError, TimeoutError),
    "CapacityError": (errors.BackendError,),
    "CodecError": (errors.KVTierError,),
    "CorruptChunkError": (errors.CodecError,),
}
NAMES = {
    "open", "open_chunks", "open_blocking", "KVStore", "ChunkStore", "BlockingStore", "BlockingChunkStore",
    "StoreConfig", "TierConfig",
    "KVLayout", "LayerGroup", "TensorSpec", "Namespace", "Prefix", "BlockHashes", "Hint", "GetRequest",
    "Hit", "PutResult", "FlushResult", "ListEntry", "LoadPlan", "Prefill", "Stats",
    "Lease", "LeasedChunk", "Event", "Observer", "__version__",
}  # fmt: skip

# subject(s), then what is keyword-only
FUNCTIONS = {
    "open": ("config", "layout namespace observer strict lossless"),
    "open_chunks": ("config", "observer strict lossless"),
    "open_blocking": ("config", "layout namespace observer strict lossless queue_calls"),
    "KVStore.get": ("prefix", "start max_tokens out device deadline_seconds wait_seconds min_benefit_seconds hint"),
    "KVStore.get_many": ("requests", "deadline_seconds"),
    "KVStore.put": ("prefix kv", "start wait ttl_seconds partial lossy deadline_seconds hint"),
    "KVStore.put_layers": ("prefix", "start wait ttl_seconds partial lossy deadline_seconds hint"),
    "KVStore.plan": ("prefix", "start max_tokens split deadline_seconds"),
    "KVStore.exists": ("prefix", "max_tokens deadline_seconds"),
    "KVStore.exists_many": ("prefixes", "max_tokens deadline_seconds"),
    "KVStore.delete": ("prefix", "start deadline_seconds"),
    "KVStore.list": ("prefix", "deadline_seconds"),
    "KVStore.lease": ("prefix", "start max_tokens deadline_seconds"),
    "KVStore.stream": ("prefix", "start max_tokens by deadline_seconds"),
    "KVStore.prefetch": ("prefix", "to max_tokens deadline_seconds"),
    "KVStore.touch": ("prefix", "ttl_seconds hint"),
    "KVStore.pin": ("prefix", "tier ttl_seconds"),
    "KVStore.unpin": ("prefix", "tier"),
    "KVStore.end_session": ("session", ""),
    "KVStore.clear": ("", "namespace salt deadline_seconds"),
    "KVStore.namespaces": ("", ""),
    "KVStore.flush": ("", "deadline_seconds"),
    "KVStore.pressure": ("", ""),
    "KVStore.stats": ("", ""),
    "KVStore.aclose": ("", ""),
    "KVStore.with_namespace": ("namespace", "layout"),
    "ChunkStore.get": ("key", "into deadline_seconds"),
    "ChunkStore.get_many": ("keys", "into deadline_seconds"),
    "ChunkStore.put": ("key blob", "wait ttl_seconds deadline_seconds hint"),
    "ChunkStore.put_many": ("blobs", "wait ttl_seconds deadline_seconds hint"),
    "ChunkStore.exists": ("key", "deadline_seconds"),
    "ChunkStore.exists_many": ("keys", "deadline_seconds"),
    "ChunkStore.delete": ("key", "deadline_seconds"),
    "ChunkStore.delete_many": ("keys", "deadline_seconds"),
    "ChunkStore.list": ("prefix", "deadline_seconds"),
}


def test_all_is_what_is_documented():
    assert set(kvtier.__all__) == NAMES | set(ERRORS)
    assert kvtier.__all__ == sorted(kvtier.__all__)
    assert set(kvtier.__all__) <= set(dir(kvtier))


@pytest.mark.parametrize("name", sorted(NAMES | set(ERRORS)))
def test_every_name_is_there_and_in_the_reference(name):
    value = getattr(kvtier, name)
    if name == "__version__":
        assert re.match(r"\d+\.\d+", value)
        return
    home = f"{value.__module__}.{value.__qualname__}"
    assert value.__doc__, f"{home} has no docstring"
    assert any(home == place or home.startswith(place + ".") or offers(place, value) for place in DOCUMENTED), (
        f"{home} is public, but no page of docs/reference shows it"
    )


def offers(place, value):
    """Tell whether a documented package has the object in its `__all__`."""
    try:
        module = import_module(place)
    except ModuleNotFoundError:  # an object, not a module
        return False
    return value in [getattr(module, name) for name in getattr(module, "__all__", ())]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        kvtier.opne  # noqa: B018


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_the_tree_of_errors(name):
    assert issubclass(getattr(kvtier, name), ERRORS[name])


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_signatures_are_the_documented_ones(name):
    function = kvtier
    for part in name.split("."):
        function = getattr(function, part)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    subject, keywords = FUNCTIONS[name]
    assert positional == subject.split()
    assert named == keywords.split()
    assert len(parameters) == len(positional) + len(named), "no *args, no **kwargs"


@pytest.mark.parametrize("cls", [kvtier.KVStore, kvtier.ChunkStore], ids=lambda cls: cls.__name__)
def test_no_public_method_is_missing_from_the_table(cls):
    public = {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    assert public == {name.split(".")[1] for name in FUNCTIONS if name.startswith(cls.__name__ + ".")}

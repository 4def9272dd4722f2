"""Case 19: a stored value is replaced by something that runs code when it is unpickled. It never runs."""

import ast
import io
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
import xxhash

import kvtier
from kvtier.chunk.container import CodecRef
from kvtier.chunk.segments import SegmentSpec
from kvtier.store import open_chunks
from kvtier.testing.containers import seal_parts
from kvtier.testing.kv_values import same_bits

KEY = "some/key"
VALUE = torch.arange(3000, dtype=torch.int32)


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def as_pickle(canary):
    return pickle.dumps(Touch(canary))


def as_torch_save(canary):
    file = io.BytesIO()
    torch.save({"tensor": VALUE, "more": Touch(canary)}, file)
    return file.getvalue()


def as_numpy_objects(canary):
    numpy = pytest.importorskip("numpy")
    file = io.BytesIO()
    numpy.save(file, numpy.array([Touch(canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


def as_text(canary):
    return f"open({str(canary)!r}, 'w')".encode()


def as_yaml(canary):
    return f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{canary}]]".encode()


def as_nothing(canary):
    return b""


BARE = [as_nothing, as_pickle, as_torch_save, as_numpy_objects, as_text, as_yaml]


def in_container(payload, *, dtype="uint8", kind="tensor", chain=(), raw=None):
    """A container whose checksums are all right around `payload`."""
    spec = SegmentSpec(name="", dtype=dtype, shape=(raw or len(payload),))
    sealed = seal_parts([spec], [payload], key=KEY, namespace="", kind=kind, chain=chain)
    return sealed.bytes


def with_codec(name, **options):
    return lambda canary: in_container(as_pickle(canary), chain=(CodecRef(name=name, options=options),), raw=5000)


def with_word(old, new, **fields):
    """Another word of the same length in the header, and the checksum that the format's description asks for."""

    def make(canary):
        payload = as_pickle(canary)
        payload += bytes(-len(payload) % 8)
        container = bytearray(in_container(payload, raw=len(payload), **fields))
        (offset,) = struct.unpack_from("<Q", container, 16)
        front = bytes(container[:offset])
        assert len(old) == len(new)
        assert front.count(old) == 1
        container[:offset] = front.replace(old, new)
        summed = xxhash.xxh3_64(bytes(container[:32]) + bytes(container[40:offset])).intdigest()
        struct.pack_into("<Q", container, 32, summed)
        return bytes(container)

    return make


WRAPPED = {
    "codec pickle": with_codec("pickle"),
    "codec builtins.eval": with_codec("builtins.eval"),
    "codec builtins:eval": with_codec("builtins:eval"),
    "codec os.system": with_codec("os.system", command="true"),
    "codec of nobody": with_codec("no-such-codec"),
    "codec by import path": with_codec("kvtier.codecs.raw:RawCodec"),
    "codec that is no word": with_codec("../../pickle"),
    "zstd with other options": with_codec("zstd", object_hook="builtins.eval"),
    "zstd of a pickle": with_codec("zstd"),
    "zstd of a pickle, with its own options": with_codec("zstd", level=1),
    "dtype pickle": with_word(b"\xa5uint8", b"\xa5pickl"),
    "dtype object": with_word(b"\xa4bool", b"\xa4obj_", dtype="bool"),
    "dtype builtins.eval": with_word(b"float8_e4m3fn", b"builtins.eval", dtype="float8_e4m3fn"),
    "dtype of torch that is none": with_word(b"\xa4bool", b"\xa4load", dtype="bool"),
    "kind pickle": with_word(b"\xa6tensor", b"\xa6pickle"),
}


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / "disk")


class Disk:
    def __init__(self, path):
        self.path = path
        tier = {"backend": "local-disk", "name": "disk", "path": str(path), "capacity": "64MiB", "codecs": ["zstd"]}
        self.config = {"deadline_seconds": 60, "memory": {"staging_bytes": "4MiB"}, "tiers": [tier]}

    @property
    def file(self):
        (file,) = [path for path in (self.path / "entries").rglob("*") if path.is_file()]
        return file

    async def plant(self, content):
        """Store a value, and have something else in its place."""
        async with open_chunks(self.config) as store:
            await store.put(KEY, VALUE, wait="durable")
        self.file.write_bytes(content)
        os.utime(self.file, ns=(0, 0))


async def assert_a_miss_that_is_counted_once(disk, canary):
    async with open_chunks(disk.config) as store:
        assert await store.get(KEY) is None
        assert await store.get(KEY) is None
        assert await store.exists(KEY) is False
        assert [entry.key async for entry in store.list()] == []
        assert store.stats().tiers["disk"].corrupt == 1
        assert not canary.exists()
        await store.put(KEY, VALUE, wait="durable")
        assert same_bits(await store.get(KEY), VALUE)
    assert not canary.exists()


@pytest.mark.parametrize("kind", BARE, ids=lambda kind: kind.__name__)
async def test_a_planted_file_is_a_miss_and_never_runs(disk, tmp_path, kind):
    canary = tmp_path / "canary"
    await disk.plant(kind(canary))
    await assert_a_miss_that_is_counted_once(disk, canary)


@pytest.mark.parametrize("how", sorted(WRAPPED))
async def test_wrapped_in_a_well_formed_container_it_is_a_miss_and_never_runs(disk, tmp_path, how):
    canary = tmp_path / "canary"
    await disk.plant(WRAPPED[how](canary))
    await assert_a_miss_that_is_counted_once(disk, canary)


@pytest.mark.parametrize("log", [True, False])
async def test_a_planted_journal_and_format_file_never_run(disk, tmp_path, log):
    canary = tmp_path / "canary"
    await disk.plant(b"")
    if log:
        for path in (disk.path / "journal").iterdir():
            path.write_bytes(as_pickle(canary))
        (disk.path / "journal" / "1-0123456789abcdef").write_bytes(as_pickle(canary))
    await assert_a_miss_that_is_counted_once(disk, canary)


async def test_a_pickle_that_somebody_stores_is_bytes(disk, tmp_path):
    content = as_pickle(tmp_path / "canary")
    async with open_chunks(disk.config) as store:
        await store.put(KEY, content, wait="durable")
    async with open_chunks(disk.config) as store:
        assert await store.get(KEY) == content
    assert not (tmp_path / "canary").exists()


def test_the_canary_is_touched_by_who_unpickles_it(tmp_path):
    """The control: what the tests plant does run elsewhere."""
    for number, kind in enumerate([as_pickle, as_torch_save]):
        canary = tmp_path / str(number)
        content = io.BytesIO(kind(canary))
        pickle.load(content) if kind is as_pickle else torch.load(content, weights_only=False)
        assert canary.exists()


MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load"), ("torch", "jit"), ("torch", "hub")}
YAML = {
    "load_all",
    "full_load",
    "full_load_all",
    "unsafe_load",
    "unsafe_load_all",
    "Loader",
    "FullLoader",
    "UnsafeLoader",
}


def offences(source):
    """What in a module could run code that somebody planted, by line."""
    found = []
    tree = ast.parse(source)
    safe = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
    } | {"yaml.SafeLoader"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [(node.lineno, name.name) for name in names if name.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                found += [
                    (node.lineno, f"{module}.{name.name}")
                    for name in names
                    if module.split(".")[0] in MODULES or (module, name.name) in LOADERS or module == "yaml"
                ]
            case ast.Name(id=name) if name in BUILTINS:
                found.append((node.lineno, name))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load"), keywords=keywords):
                loaders = [ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "Loader"]
                if len(loaders) != 1 or loaders[0] not in safe:
                    found.append((node.lineno, ast.unparse(node)))
            case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                if (owner, attr) in LOADERS or (owner == "yaml" and attr in YAML):
                    found.append((node.lineno, f"{owner}.{attr}"))
    return found


def test_nothing_in_the_package_could_run_what_is_planted():
    sources = sorted(Path(kvtier.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert {str(path): found for path in sources if (found := offences(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, _pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "load = torch.load",
        "np.load(file)",
        "eval('1')",
        "run = exec",
        "__import__('x')",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "from yaml import load",
        "class L(yaml.Loader): pass\nyaml.load(text, Loader=L)",
    ],
)
def test_the_check_finds_what_it_is_for(line):
    assert offences(line)


def test_the_check_lets_safe_things_pass():
    assert offences("yaml.safe_load(text)") == []
    assert offences("class L(yaml.SafeLoader): pass\nyaml.load(text, Loader=L)") == []
    assert offences("model.eval()\nre.compile('x')\ncodecs.load('zstd')") == []

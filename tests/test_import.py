"""`import kvtier` costs next to nothing and does nothing. (How long it takes is measured by a benchmark.)"""

import subprocess
import sys
from pathlib import Path

import pytest

import kvtier

ROOT = Path(kvtier.__file__).parents[1]
HEAVY = [
    "torch",
    "numpy",
    "pydantic",
    "transformers",
    "redis",
    "aioboto3",
    "boto3",
    "aiohttp",
    "zstandard",
    "yaml",
    "prometheus_client",
]


def run(code):
    """Run code in a fresh interpreter, which sees this source tree; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_brings_neither_torch_nor_pydantic_nor_any_client_library():
    loaded = run("import kvtier; print([name for name in sys.modules])")
    assert [name for name in HEAVY if f"'{name}'" in loaded] == []
    assert "'asyncio'" not in loaded


@pytest.mark.parametrize(
    ("use", "free_of"),
    [
        ("kvtier.KVTierError, kvtier.ClosedError", HEAVY),
        ("kvtier.Namespace(model='m'), kvtier.Prefix([1, 2])", HEAVY),
        ("kvtier.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8).describe()", HEAVY),
        ("kvtier.StoreConfig", ["torch", "transformers", "redis", "aioboto3", "yaml"]),
    ],
)
def test_a_name_brings_only_what_it_needs(use, free_of):
    loaded = run(f"import kvtier; {use}; print([name for name in sys.modules])")
    assert [name for name in free_of if f"'{name}'" in loaded] == []


def test_it_has_no_effects():
    code = """
import logging, os, threading, warnings
before = set(os.listdir("/proc/self/fd")), dict(os.environ), threading.active_count(), warnings.filters[:]
import kvtier
after = set(os.listdir("/proc/self/fd")), dict(os.environ), threading.active_count(), warnings.filters[:]
assert after == before, (before, after)
assert not logging.getLogger().handlers
assert logging.getLogger("kvtier").level == logging.NOTSET
print("no effects")
"""
    assert run(code) == "no effects"


@pytest.mark.parametrize(
    "module",
    [
        "kvtier.chunk.container",
        "kvtier.chunk.layout",
        "kvtier.backends.base",
        "kvtier.backends.local_disk",
        "kvtier.backends.pinned_cpu",
        "kvtier.codecs.zstd",
        "kvtier.policies.lru",
        "kvtier.config",
        "kvtier.keys",
        "kvtier.testing.backends",
    ],
)
def test_it_can_be_imported_where_there_is_no_torch(module):
    code = f"sys.modules['torch'] = sys.modules['numpy'] = None\nimport {module}\nprint('imported')"
    assert run(code) == "imported"

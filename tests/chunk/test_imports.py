"""What must work where torch cannot be imported: reading and writing containers, and the disk tier that does it."""

import subprocess
import sys

import pytest

MODULES = [
    "kvtier.chunk.container",
    "kvtier.chunk.layout",
    "kvtier.chunk.hf_config",
    "kvtier.codecs.base",
    "kvtier.codecs.chain",
    "kvtier.codecs.raw",
    "kvtier.codecs.zstd",
]
READ = """
import sys
sys.modules["torch"] = None
from kvtier.chunk.container import verify
from kvtier.chunk.layout import KVLayout
from kvtier.codecs.chain import CodecChain, Scratch
from kvtier.codecs.zstd import ZstdCodec
from kvtier.testing.containers import SAMPLES
for make in SAMPLES.values():
    sealed = make()
    assert verify(sealed.view, key=sealed.header.key, codecs={"int8", "zstd"}, max_raw=1 << 20) == sealed.header
spec = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4).specs("full", tokens=2, first_token=0)[0]
chain, into, raw = CodecChain([ZstdCodec()]), bytearray(1000), bytearray(16)
size = chain.encode(memoryview(b"0123456789abcdef"), memoryview(into), spec, Scratch())
chain.decode(memoryview(into)[:size], memoryview(raw), spec, Scratch())
assert raw == b"0123456789abcdef"
print("done")
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_containers_work_without_torch():
    result = run(READ)
    assert result.stdout == "done\n", result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_torch_by_itself(module):
    result = run(f"import sys, {module}; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr

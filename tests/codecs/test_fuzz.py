"""Damaged and forged containers, many of them: read, refused or decoded, never anything else.

`KVTIER_FUZZ` sets how many (50,000); `make fuzz` runs more, with other seeds.
"""

import os
import random
import struct
import time
import tracemalloc

import pytest
import torch
import xxhash
import zstandard

from kvtier.chunk import container
from kvtier.chunk.container import segment_view, verify
from kvtier.chunk.header import CodecRef, unpack_header
from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs.chain import CodecChain, Scratch, chain_from_refs
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import CodecError, ConfigError, CorruptChunkError
from kvtier.registry import codecs as registered
from kvtier.testing.containers import KEY, seal_parts

COUNT = int(os.environ.get("KVTIER_FUZZ", "50000"))
SEED = int(os.environ.get("KVTIER_FUZZ_SEED", "1"))
CAP = 1 << 20
CHAINS = [["int8"], ["int4"], ["k5v4"], ["fp8"], ["bf16-split"], ["zstd"], ["int8", "zstd"], ["k5v4", "zstd"], []]
CLASSES = {name: registered.load(name) for chain in CHAINS for name in chain}
_FRONT = struct.Struct("<8sHHIQQQ")


def sample(names, seed):
    generator = torch.Generator().manual_seed(seed)
    chain, scratch = CodecChain([CLASSES[name]() for name in names]), Scratch()
    specs, stored = [], []
    for name in "kv":
        values = torch.randn((1, 24, 2, 32), generator=generator).bfloat16()
        if seed % 3 == 0:
            values[0, 20, 0, 1] = float("inf")
        specs.append(SegmentSpec(name=name, dtype="bfloat16", shape=tuple(values.shape), axes="LTHD", first_token=0))
        raw = memoryview(values.view(torch.uint8).numpy()).cast("B")
        into = memoryview(bytearray(chain.bound(len(raw), specs[-1])))
        stored.append(bytes(into[: chain.encode(raw, into, specs[-1], scratch)]))
    return seal_parts(specs, stored, chain=chain.refs, lossy=chain.lossy, tokens=24).bytes


def damaged(chance, whole):
    """Flip, cut, insert, repeat: anywhere, most often where the structure is."""
    view = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(chance.choice((64, 600, len(view))))
        kind = chance.randrange(4)
        if kind == 0:
            view[at % len(view)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            view[at % len(view)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind == 2:
            del view[at : at + chance.choice((1, 8, 4096))]
        else:
            view[at:at] = chance.randbytes(chance.choice((1, 8, 64)))
        if len(view) < 8:
            break
    return view


def forged(chance, whole):
    """Change header or payload, then make every checksum right again: somebody who can write to the medium."""
    view = bytearray(whole)
    _, _, _, length, offset, _, _ = _FRONT.unpack_from(view)
    header = unpack_header(memoryview(view)[_FRONT.size : _FRONT.size + length])
    sums = [(segment.checksum.to_bytes(8, "big"), segment) for segment in header.segments]
    for _ in range(chance.choice((1, 1, 2, 4))):
        segment = chance.choice(header.segments)
        begin = offset + segment.offset
        near = chance.choice((16, 64, 300, segment.stored))
        at = begin + (chance.randrange(min(near, segment.stored)) if chance.random() < 0.8 else segment.stored - 1)
        view[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, view[at] ^ 1 << chance.randrange(8)))
    for old, segment in sums:
        begin = offset + segment.offset
        new = xxhash.xxh3_64_intdigest(view[begin : begin + segment.stored]).to_bytes(8, "big")
        front = bytes(view[:offset])
        view[:offset] = front.replace(old, new)
    if chance.random() < 0.5:  # and a byte of the header
        view[_FRONT.size + chance.randrange(length)] = chance.randrange(256)
    struct.pack_into("<Q", view, _FRONT.size - 8, container._front_checksum(memoryview(view), offset))
    return view


def read(view, scratch):
    """Do with a container what a tier does; return True if it was served."""
    whole = memoryview(view)
    try:
        header = verify(whole, key=KEY, codecs=CLASSES, max_raw=CAP)
        chain = chain_from_refs(header.chain, CLASSES.__getitem__)
        for segment in header.segments:
            target = memoryview(bytearray(segment.raw))
            chain.decode(segment_view(whole, header, segment), target, segment.spec, scratch)
    except (CorruptChunkError, CodecError, ConfigError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(int(max(300, COUNT / 50)))
def test_fuzzed_containers():
    chance, scratch = random.Random(SEED), Scratch()
    wholes = [sample(names, seed) for seed in range(3) for names in CHAINS]
    assert all(read(bytearray(whole), scratch) for whole in wholes)
    served = refused = 0
    for number in range(COUNT):
        whole = chance.choice(wholes)
        view = forged(chance, whole) if number % 3 == 0 else damaged(chance, whole)
        watched = number % 100 == 0
        if watched:
            tracemalloc.start()
        try:
            if read(view, scratch):
                served += 1
                assert number % 3 == 0 or view == whole, "damage was served"
            else:
                refused += 1
            if watched:
                assert tracemalloc.get_traced_memory()[1] < 8 * CAP
        except Exception as exc:
            raise AssertionError(f"container {number} of seed {SEED}: {exc!r}") from exc
        finally:
            if watched:
                tracemalloc.stop()
    assert served
    assert refused > COUNT // 2


def test_a_zstd_bomb_is_refused_at_once():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    spec = SegmentSpec(name="", dtype="bytes", shape=(4096,))
    chain = CodecChain([ZstdCodec()])
    for size in (4096, 1 << 28):
        target = memoryview(bytearray(min(size, 4096)))
        begin = time.process_time()
        with pytest.raises(CodecError):
            chain.decode(memoryview(bomb), target, spec, Scratch())
        assert time.process_time() - begin < 0.1  # of this thread's work: no wall time
    assert CodecRef(name="zstd") is not None

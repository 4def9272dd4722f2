"""Entries of a later format, by a newer kvtier on the same directory: missed one by one, and left where they are."""

import os
import struct

import pytest
import xxhash

import kvtier

FRONT = struct.Struct("<8sHHIQQ")


def make_later(path):
    """Give an entry the format after this one, checksum and all."""
    content = bytearray(path.read_bytes())
    magic, version, flags, length, offset, payload = FRONT.unpack_from(content, 0)
    FRONT.pack_into(content, 0, magic, version + 1, flags, length, offset, payload)
    state = xxhash.xxh3_64(content[: FRONT.size])
    state.update(content[FRONT.size + 8 : offset])
    struct.pack_into("<Q", content, FRONT.size, state.intdigest())
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))  # the time is the expiry: none


@pytest.mark.parametrize("journal", ["kept", "lost"])
async def test_later_formats_are_missed_and_left_alone(tmp_path, journal):
    config = {"tiers": [{"backend": "local-disk", "name": "disk", "path": str(tmp_path), "capacity": "1MiB"}]}
    async with kvtier.open_chunks(config) as store:
        await store.put("later", b"value", wait="durable")
        (path,) = tmp_path.glob("entries/*/*/*")
        await store.put("ours", b"value", wait="durable")
    make_later(path)
    later = path.read_bytes()
    if journal == "lost":
        for log in tmp_path.glob("journal/*"):
            log.unlink()
    async with kvtier.open_chunks(config) as store:
        assert await store.get("later") is None
        assert bytes(await store.get("ours")) == b"value"
        keys = [entry.key async for entry in store.list("")]
        assert "ours" in keys
        await store.flush()
        assert store.stats().tiers["disk"].corrupt == 0
        assert path.read_bytes() == later
        await store.put("later", b"of this format", wait="durable")  # a newer value replaces it, as any put does
        assert bytes(await store.get("later")) == b"of this format"

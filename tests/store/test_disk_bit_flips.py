"""Every byte of an entry on disk, changed: the value is a miss, never another one; and puts heal it."""

import os
import random

import kvtier

STEP = int(os.environ.get("KVTIER_SWEEP_STEP", "17"))  # `make kill` asks for every byte


def one_entry(root):
    (path,) = root.glob("entries/*/*/*")
    return path


async def test_a_flip_in_any_byte_is_a_miss(tmp_path):
    """One bit in each byte of a small entry: its front, its payload, its padding."""
    config = {"tiers": [{"backend": "local-disk", "name": "disk", "path": str(tmp_path), "capacity": "1MiB"}]}
    choose = random.Random(4)
    async with kvtier.open_chunks(config) as store:
        await store.put("key", b"value" * 100, wait="durable")
        whole = one_entry(tmp_path).read_bytes()
        assert len(whole) == 8192
        places = range(0, len(whole), STEP)
        for place in places:
            spoilt = bytearray(whole)
            spoilt[place] ^= 1 << choose.randrange(8)
            path = next(tmp_path.glob("entries/*/*/*"), None)
            if path is None:
                await store.put("key", b"value" * 100, wait="durable")
                path = one_entry(tmp_path)
            path.write_bytes(spoilt)
            assert await store.get("key") is None, f"byte {place} changed, and the value was served"
            await store.flush()
        assert store.stats().tiers["disk"].corrupt == len(places)
        await store.put("key", b"healed", wait="durable")
        assert bytes(await store.get("key")) == b"healed"

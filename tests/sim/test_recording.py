"""What a store was asked for is written down and replayed: the simulator counts what the store counted."""

import json

import torch

import kvtier
from kvtier.registry import policies
from kvtier.sim.recording import Recorder
from kvtier.sim.replay import Replay
from kvtier.sim.tier import SimTier
from kvtier.sim.traces import read_trace
from kvtier.tier.settings import TierSettings

LAYOUT = kvtier.KVLayout(num_layers=1, num_kv_heads=1, head_dim=4)


async def test_a_recording_replays_as_the_store_ran(tmp_path):
    path = tmp_path / "asked.jsonl"
    tiers = [{"backend": "pinned-cpu", "capacity": "1MiB"}]
    with Recorder(path) as recorder:
        async with kvtier.open(
            {"chunk_tokens": 4, "tiers": tiers},
            namespace=kvtier.Namespace(model="org/model", revision="1"),
            layout=LAYOUT,
            observer=recorder,
        ) as store:
            for last, session in ((1, "one"), (2, "two"), (1, "one")):
                tokens = [7] * 8 + [last] * 6
                hit = await store.get(tokens, hint=kvtier.Hint(session=session, priority=2))
                start = hit.num_tokens if hit else 0
                del hit
                kv = torch.zeros(1, len(tokens) - start, 1, 4, dtype=torch.bfloat16)
                await store.put(tokens, {"k": kv, "v": kv}, start=start)
            counted = store.stats().tiers["pinned-cpu"].hits
    trace = read_trace(path)
    assert trace.block_tokens == 4
    assert [len(request.keys) for request in trace.requests] == [3, 3, 3]
    assert [(request.session, request.priority, request.tokens) for request in trace.requests[:2]] == [
        ("one", 2, 14),
        ("two", 2, 14),
    ]
    tier = SimTier(TierSettings(name="tier", capacity=1 << 20), policies.load("lru")())
    assert Replay([tier], block_bytes=4096).run(trace).hits == counted == 2 + 3
    assert "7" not in json.loads(path.read_text().splitlines()[0])

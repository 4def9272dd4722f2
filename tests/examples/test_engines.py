"""The engines in `examples/`, run as a reader would, and killed, corrupted and cut short on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.backends.disk_layout import ENTRIES
from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY, SeaweedServer, has_weed
from kvtier.testing.servers.fixtures import short_folder
from kvtier.testing.servers.redis_servers import RedisServer, redis_program, valkey_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(name, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, *, within=200):
    try:
        output, errors = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, output + errors
    said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda line: line.get("rank", 0))  # ranks end in any order


def run(name, *arguments):
    return finish(start(name, *arguments))


def wait_for_line(process, text):
    """Read the program's output up to a line; a program that ends before fails the test."""
    guard = threading.Timer(200, process.kill)
    guard.start()
    try:
        for line in process.stdout:
            if text in line:
                return
    finally:
        guard.cancel()
    pytest.fail(f"ended without {text!r}: {process.stderr.read()}")


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def entries(folder):
    return sorted(path for path in (folder / ENTRIES).rglob("*") if path.is_file())


def flip_a_byte(path):
    """Damage an entry; its modification time, which is its expiry, stays."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_paged_engine_says_the_same_with_and_without_a_store(tmp_path):
    plain = run("paged_engine.py")[0]
    process = start("paged_engine.py", tmp_path)
    wait_for_line(process, "saving")
    kill(process)  # some chunks are on disk, others are not, one may be half written
    second = run("paged_engine.py", tmp_path)[0]
    third = run("paged_engine.py", tmp_path)[0]
    assert plain["digest"] == second["digest"] == third["digest"]
    assert plain["computed"] >= second["computed"] > third["computed"]
    assert third["loaded"] == 6 * 128  # 150 tokens each: four chunks of 32
    for path in entries(tmp_path):
        flip_a_byte(path)
    fourth = run("paged_engine.py", tmp_path)[0]  # costs time only; later requests find what earlier ones put anew
    assert fourth["digest"] == plain["digest"]
    assert fourth["loaded"] < third["loaded"]
    assert plain["free"] == second["free"] == third["free"] == fourth["free"] == 40


def test_tensor_parallel_ranks_agree_when_a_chunk_of_one_is_corrupt(tmp_path):
    first = run("tensor_parallel.py", tmp_path)
    assert [rank["agreed"] for rank in first] == [0, 0]
    before = entries(tmp_path)
    assert len(before) == 8  # four chunks of each rank
    second = run("tensor_parallel.py", tmp_path)
    assert [(rank["arrived"], rank["agreed"]) for rank in second] == [(128, 128)] * 2
    flip_a_byte(before[3])
    third = run("tensor_parallel.py", tmp_path)
    assert [rank["existed"] for rank in third] == [128, 128]
    assert max(rank["arrived"] for rank in third) == 128  # one rank had everything,
    assert min(rank["arrived"] for rank in third) < 128  # the other did not,
    assert third[0]["agreed"] == third[1]["agreed"] < 128  # and they go on together
    fourth = run("tensor_parallel.py", tmp_path, "late")  # what was corrupt has been put anew
    assert [(rank["existed"], rank["arrived"], rank["agreed"]) for rank in fourth] == [(128, 128, 0), (128, 0, 0)]
    assert len({rank["digest"] for rank in [*first, *second, *third, *fourth]}) == 1
    fifth = start("tensor_parallel.py", tmp_path, "dies")
    _, errors = fifth.communicate(timeout=50)  # the other rank waits for a minute if nobody tells it
    assert fifth.returncode == 1
    assert "a rank failed" in errors


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a decoder says that computes everything itself."""
    decoded = run("disaggregated_prefill.py", "decode", tmp_path_factory.mktemp("empty"), 0.1)[0]
    assert decoded["loaded"] == 0
    return decoded


def test_disaggregated_prefill_over_a_folder(tmp_path, alone):
    decoder = start("disaggregated_prefill.py", "decode", tmp_path / "kv", 120)
    wait_for_line(decoder, "waiting")
    run("disaggregated_prefill.py", "prefill", tmp_path / "kv")
    decoded = finish(decoder)[0]
    assert decoded["loaded"] == 160
    assert (decoded["said"], decoded["digest"]) == (alone["said"], alone["digest"])


def test_a_prefill_that_is_killed_on_the_way_costs_time_only(tmp_path, alone):
    decoder = start("disaggregated_prefill.py", "decode", tmp_path / "kv", 6)
    wait_for_line(decoder, "waiting")
    prefill = start("disaggregated_prefill.py", "prefill", tmp_path / "kv", 96)
    wait_for_line(prefill, "dying")
    kill(prefill)
    decoded = finish(decoder)[0]
    assert decoded["loaded"] <= 128
    assert (decoded["said"], decoded["digest"]) == (alone["said"], alone["digest"])


def hand_over(tier, tmp_path, alone):
    """Prefill in one process, decode in another, over the tier that these lines of TOML describe."""
    config = tmp_path / "tiers.toml"
    config.write_text("[[tiers]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in tier.items()))
    decoder = start("disaggregated_prefill.py", "decode", config, 6)
    wait_for_line(decoder, "waiting")
    prefill = start("disaggregated_prefill.py", "prefill", config, 96)
    wait_for_line(prefill, "dying")
    kill(prefill)
    decoded = finish(decoder)[0]
    assert decoded["loaded"] <= 128
    assert (decoded["said"], decoded["digest"]) == (alone["said"], alone["digest"])
    decoder = start("disaggregated_prefill.py", "decode", config, 120)
    wait_for_line(decoder, "waiting")
    run("disaggregated_prefill.py", "prefill", config)
    decoded = finish(decoder)[0]
    assert decoded["loaded"] == 160
    assert (decoded["said"], decoded["digest"]) == (alone["said"], alone["digest"])


@pytest.mark.redis
def test_disaggregated_prefill_over_redis(tmp_path, alone):
    program = valkey_program() or redis_program()
    if program is None:
        pytest.skip("no Redis or Valkey server is installed")
    with short_folder() as folder, RedisServer(program, folder) as server:
        hand_over({"backend": "redis", "url": server.url, "capacity": "64MiB"}, tmp_path, alone)


@pytest.mark.s3
def test_disaggregated_prefill_over_s3(tmp_path, alone):
    if not has_weed():
        pytest.skip("SeaweedFS is not installed")
    with SeaweedServer(tmp_path / "server") as server:
        server.make_bucket("kv-of-prompts")
        keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        tier = {"backend": "s3", "bucket": "kv-of-prompts", "endpoint": server.url, "capacity": "64MiB", **keys}
        hand_over(tier, tmp_path, alone)

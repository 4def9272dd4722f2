"""Wrong input to every command: status 2 and what to write instead, in place of a traceback; tables in 80 columns."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("size", "--model", "smollm2-135m", "--link", "a=b"), "--link 'b' is not a size"),
        (("size", "--model", "smollm2-135m", "--capacity", "a=b"), "--capacity 'b' is not a size"),
        (("size", "--config", "nofile"), "nofile: No such file"),
        (("simulate", "multi-turn-chat", "--link", "a=b"), "--link 'b' is not a size"),
        (("simulate", "multi-turn-chat", "--bytes-per-token", "b"), "--bytes-per-token 'b' is not a size"),
        (("simulate", "multi-turn-chat", "--tokens-per-second", "0"), "greater than or equal to 0.001"),
        (("simulate", "multi-turn-chat", "--block-tokens", "-4"), "greater than or equal to 1"),
        (("doctor", "--token-bytes", "b"), "--token-bytes 'b' is not a size"),
        (("put", "key", "nofile"), "nofile: No such file"),
        (("config", "init", "nowhere/kvtier.toml"), "nowhere/kvtier.toml: No such file"),
        (("ls", "--config", "nofile.toml"), "no config file 'nofile.toml'"),
        (("migrate", "old"), "Missing argument"),
        (("nothing",), "No such command"),
    ],
)
def test_wrong_input(kvtier, words, told):
    said = kvtier(*words)
    assert said.status == 2
    assert told in said.text.replace(" │ │ ", " ")
    assert "Traceback" not in said.text
    assert all(len(line) <= 80 for line in said.err.splitlines() if not line.startswith("kvtier: "))


@pytest.mark.parametrize(
    "words",
    [
        ("size", "--model", "llama-3.1-405b", "--sessions", 100_000, "--context", 128_000, "--capacity", "disk=30TB"),
        ("simulate", "trace.jsonl", "--policy", "adaptive,s3-fifo", "--capacity-blocks", "100000,1000000"),
    ],
)
def test_tables_fit_into_80_columns(kvtier, words, tmp_path):
    requests = [{"timestamp": i, "input_length": 100_000, "output_length": 5, "hash_ids": [0, i]} for i in range(9)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, requests)))
    said = kvtier(*words)
    assert said.status == 0
    assert all(len(line.rstrip()) <= 80 for line in said.out.splitlines() if "requests" not in line)
    assert "…" not in said.out


@pytest.mark.parametrize(
    "command",
    [
        "",
        "config",
        "doctor",
        "ls",
        "stat",
        "get",
        "put",
        "rm",
        "verify",
        "gc",
        "migrate",
        "bench",
        "top",
        "demo",
        "size",
        "simulate",
    ],
)
def test_help_fits_and_says_what_it_does(kvtier, command):
    said = kvtier(*command.split(), "--help")
    assert said.status == 0
    assert all(len(line) <= 80 for line in said.out.splitlines())
    assert "Usage: kvtier" in said.out


def test_a_reader_that_leaves_ends_it_quietly(on_disk, tmp_path):
    command = f"{sys.executable} -m kvtier config schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=200, cwd=tmp_path, check=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_help_is_quick_since_nothing_heavy_is_imported():
    heavy = "{'torch', 'pydantic', 'numpy', 'redis', 'botocore'}"
    program = f"import sys, kvtier.cli.app; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "[]\n"

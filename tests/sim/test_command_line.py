"""The commands as a user runs them, and what they say when something is missing."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvtier.cli import __main__ as entry
from kvtier.cli.app import app
from kvtier.errors import ConfigError, InvalidValueError, UnknownPluginError

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 4]},
    {"timestamp": 9000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES))
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def simulated(*arguments):
    return json.loads(run("simulate", *arguments, "--json"))


def test_simulate_in_its_basic_form(trace):
    answer = simulated(trace, "--policy", "lru", "--capacity-blocks", "10000")
    assert (answer["policy"], answer["capacity_blocks"]) == ("lru", 10000)
    assert (answer["hits"], answer["blocks"]) == (4, 8)
    assert answer["hit_rate"] == answer["optimum_hit_rate"] == 0.5
    assert answer["trace"]["distinct_blocks"] == 4


def test_full_blocks_alone_are_stored_but_all_count(trace):
    answer = simulated(trace, "--full-blocks")
    assert (answer["hits"], answer["blocks"]) == (4, 8)
    assert answer["tiers"][0]["written"] == 2


def test_packed_traces(trace):
    import zstandard

    packed = trace.with_suffix(".jsonl.zst")
    packed.write_bytes(zstandard.compress(trace.read_bytes()))
    assert simulated(packed)["hits"] == 4


def test_generic_traces_and_sessions_that_end(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [
        {"seconds": 0, "keys": ["a", "b"], "session": "one"},
        {"seconds": 1, "keys": ["a", "b", "c"], "session": "one", "ends_session": True},
        {"seconds": 2, "keys": ["x"], "session": "two"},
        {"seconds": 3, "keys": ["y", "z"], "session": "three"},
        {"seconds": 4, "keys": ["x"], "session": "two"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert simulated(path, "--capacity-blocks", "3", "--policy", "lfu")["hits"] == 2
    assert simulated(path, "--capacity-blocks", "3", "--policy", "lfu", "--hints")["hits"] == 3


def test_sweeps_tables_and_reports(trace, tmp_path):
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    table = run("simulate", trace, "--policy", "lru,adaptive", "--capacity-blocks", "1,2", "--report", page)
    assert "adaptive" in table
    assert "0.2500" in table
    assert "src='data:image/png;base64," in page.read_text()
    assert "http" not in page.read_text()
    run("simulate", trace, "--report", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tiers_from_a_config(trace, tmp_path):
    config = tmp_path / "kvtier.toml"
    config.write_text(
        '[[tiers]]\nbackend = "pinned-cpu"\ncapacity = "64MiB"\n'
        '[[tiers]]\nbackend = "local-disk"\npath = "kv"\ncapacity = "1GiB"\n'
    )
    answer = simulated(trace, "--config", config)
    memory, disk = answer["tiers"]
    assert (memory["name"], memory["capacity_blocks"]) == ("pinned-cpu", 1)
    assert memory["hits"] + disk["hits"] == answer["hits"] == 4
    assert disk["written_bytes_per_hit"] == pytest.approx(4 * 64 * 2**20 / disk["hits"])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["simulate", "nowhere.jsonl"], InvalidValueError, "no such file"),
        (["simulate", "{trace}", "--policy", "lruu"], UnknownPluginError, "lru"),
        (["simulate", "{trace}", "--capacity-blocks", "many"], InvalidValueError, "numbers of blocks"),
        (["simulate", "{trace}", "--link", "disk"], InvalidValueError, "NAME=BYTES_PER_SECOND"),
        (["simulate", "{trace}", "--report", "x.pdf"], InvalidValueError, ".html or .png"),
        (["size", "--model", "gpt-0"], ConfigError, "llama-3.1-8b"),
        (["size", "--layers", "3"], InvalidValueError, "--kv-heads"),
    ],
)
def test_mistakes_are_told(trace, arguments, error, text):
    with pytest.raises(error, match=text):
        run(*[argument.format(trace=trace) for argument in arguments])


def test_a_bad_line_is_named(trace):
    trace.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"keys": 3}\n')
    with pytest.raises(InvalidValueError, match="line 2"):
        run("simulate", trace)


def test_a_mistake_at_the_shell_is_one_line():
    ended = subprocess.run(
        [sys.executable, "-m", "kvtier", "size", "--model", "gpt-0"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvtier: no shape 'gpt-0'")
    assert ended.stderr.count("\n") == 1


def test_what_to_install_is_said(monkeypatch, capsys):
    monkeypatch.setattr(entry, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 2
    assert "pip install 'kvtier[cli]'" in capsys.readouterr().err


def sized(*arguments):
    return json.loads(run("size", *arguments, "--json"))


def test_size_gives_the_reference_figures():
    shape = ("--layers", 80, "--kv-heads", 8, "--head-dim", 128)
    answer = sized(*shape, "--context", 1000, "--sessions", 1)
    assert answer["bytes"] == 327_680_000
    assert answer["by_format"]["int8"]["bytes"] == 163_840_000
    assert answer["by_format"]["int4"]["bytes"] == 81_920_000
    assert sized(*shape, "--context", 10_000)["bytes"] == 3_276_800_000
    assert sized(*shape, "--context", 32_768, "--sessions", 3, "--format", "int8")["bytes"] == 3 * 163_840 * 32_768
    assert answer["seconds_by_link"]["10-gbit"] == pytest.approx(327.68e6 / 1.25e9)


def test_size_of_latents_windows_and_tiers(tmp_path):
    assert sized("--model", "deepseek-v3", "--context", 1)["bytes"] == 61 * 576 * 2
    shape = ("--layers", 2, "--kv-heads", 1, "--head-dim", 8)
    assert sized(*shape, "--window", 11, "--context", 500)["bytes"] == 2 * 2 * 8 * 2 * 10
    fits = sized(*shape, "--context", 100, "--capacity", "disk=1MB")["tiers"]["disk"]
    assert fits["sessions"] == 1_000_000 // (64 * 100)


def test_size_from_a_config_of_mixed_layers(tmp_path):
    config = tmp_path / "config.json"
    fields = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 101,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "torch_dtype": "bfloat16",
    }
    config.write_text(json.dumps({"text_config": fields}))
    token_in_a_layer = 2 * 2 * 16 * 2
    assert sized("--config", config, "--context", 1000)["bytes"] == token_in_a_layer * (2 * 1000 + 2 * 100)
    config.write_text(json.dumps({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 3}))
    assert sized("--config", config, "--context", 10)["bytes"] == 3 * 576 * 2 * 10

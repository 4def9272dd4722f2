"""Links of pages that mkdocs does not build; `mkdocs build --strict` checks all others, anchors included."""

import re

import pytest
import yaml

from tests.docs.transcript import PAGES, ROOT

LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
OUTSIDE = {  # pages of others that ours point to: look at them before a release
    "https://keepachangelog.com/en/1.1.0/",
    "https://semver.org/spec/v2.0.0.html",
}
OUTSIDE_HOSTS = ("https://", "http://", "mailto:")


def links(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return LINK.findall(re.sub(r"`[^`\n]*`", "", text))


def anchors(path):
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_links_of_pages_beside_the_site(path):
    for link in links(path):
        if link.startswith(OUTSIDE_HOSTS):
            continue
        target, _, anchor = link.partition("#")
        assert (path.parent / target).exists(), link
        assert not anchor or anchor in anchors(path.parent / target if target else path), link


def test_links_to_the_outside_are_listed():
    found = {link for path in PAGES for link in links(path) if link.startswith(OUTSIDE_HOSTS)}
    assert found == OUTSIDE


def test_the_site_is_built_strictly_and_every_page_is_in_its_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    config = yaml.safe_load(text)
    assert config["strict"] is True
    assert config["validation"]["anchors"] == "warn"  # an error in a strict build
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages == set(re.findall(r"[\w./-]+\.md", str(config["nav"])))


def test_nothing_is_loaded_from_elsewhere():
    """The site works without a network: no fonts, scripts or pictures of others."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert not any("http" in str(part) for part in (config.get("extra_css"), config.get("extra_javascript")))
    for path in PAGES:
        foreign = r"!\[[^\]]*\]\(https?:|<(script|img|link)\b[^>]*https?:|```mermaid"
        assert not re.search(foreign, path.read_text()), path


def test_what_proves_a_promise_is_there():
    text = "".join(page.read_text() for page in PAGES)
    paths = re.findall(r"`((?:tests|benchmarks(?!/results/)|examples|kvtier)/[\w./-]+)`", text)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_decision_is_in_the_list_of_decisions():
    decisions = ROOT / "docs" / "design"
    listed = set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (decisions / "index.md").read_text()))
    assert listed == {path.name for path in decisions.glob("[0-9]*.md")}

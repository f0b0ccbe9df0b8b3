"""The documents as a site: Sphinx builds every page without a warning, and links lead to pages."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs import vocabulary
from docs.site.__main__ import TOP_PAGES, linked
from docs.site.pages import SECTIONS
from tests.checkout import ROOT


class Links(HTMLParser):
    """The addresses that a page links to, and those that it loads from."""

    def __init__(self) -> None:
        super().__init__()
        self.to: set[str] = set()
        self.loads: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                (self.to if tag == "a" else self.loads).add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "docs.site", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_every_page_is_there_and_reads_from_files_alone(site: Path) -> None:
    for page in (page for _, pages in SECTIONS for page in pages):
        built = (site / page).with_suffix(".html")
        links = Links()
        links.feed(built.read_text(encoding="utf-8"))
        assert not [address for address in links.loads if address.startswith(("http:", "https:"))], page
        local = {address.partition("#")[0] for address in links.to if "://" not in address} - {""}
        assert not [address for address in local if not (built.parent / address).exists()], page


def test_options_can_be_copied_from_every_page(site: Path) -> None:
    """Typography that makes a dash of `--`, or other quotes, would break a command that a reader pastes."""
    for page in (page for _, pages in SECTIONS for page in pages):
        source = next(path for path in (ROOT / "docs" / page, ROOT / page) if path.exists())
        built = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        body = built.partition("<article")[2].partition("</article>")[0]
        changed = {character for character in "–—“”‘’" if character in body} - set(source.read_text())
        assert not changed, page


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("docs/rails.md", "[a](bench.md#b)", "[a](bench.md#b)"),
        ("docs/reference/commands.md", "[a](../rails.md)", "[a](../rails.md)"),
        ("docs/rails.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/reference/commands.md", "[a](../../CONTRIBUTING.md)", "[a](../CONTRIBUTING.md)"),
        ("CONTRIBUTING.md", "[a](docs/rails.md)", "[a](docs/rails.md)".replace("docs/", "")),
        ("docs/rails.md", "[the loop](../train/loop.py)", "the loop (`train/loop.py`)"),
        ("docs/rails.md", "```text\n[a](../train/loop.py)\n```", "```text\n[a](../train/loop.py)\n```"),
        ("docs/rails.md", "[a](https://x.org/README.md)", "[a](https://x.org/README.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(source: str, text: str, expected: str) -> None:
    assert linked(text, source) == expected


def test_the_top_pages_are_in_a_section() -> None:
    assert set(TOP_PAGES) <= {page for _, pages in SECTIONS for page in pages}


def test_words_of_our_own_are_found_in_prose_and_messages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "ROOT", tmp_path)
    page, module = tmp_path / "a.md", tmp_path / "a.py"
    page.write_text("The verdict is `verdict`.\n\n```text\nverdict\n```\n")
    module.write_text('"""Return it.\n\nThe rank is told why."""\n\nverdict = "one word"\n')
    assert list(vocabulary.found_in(page)) == ["a.md:1: `verdict`: write outcome, diagnosis"]
    (line,) = vocabulary.found_in(module)
    assert line.startswith("a.py:3: `is told`")

"""The pictures of the documents come from data: they are what results and commands give, and need no web."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from docs.pictures import terminal
from docs.pictures.__main__ import FOLDER, PICTURES, main, outdated, path_of
from docs.pictures.charts import Bar, bars
from tests.checkout import DOCS, ROOT

LINK = re.compile(r"!\[[^\]]*\]\((?:docs/)?pictures/([\w-]+\.svg)\)")


def test_pictures_of_measurements_are_what_the_results_give() -> None:
    assert [path.name for path in outdated()] == [], "run `make pictures`"


def test_each_picture_is_shown_in_a_document_and_each_that_is_shown_is_there() -> None:
    documents = [ROOT / "README.md", *DOCS.glob("*.md")]
    shown = {name for document in documents for name in LINK.findall(document.read_text(encoding="utf-8"))}
    assert {path_of(name).name for name in PICTURES} <= shown
    assert [name for name in shown if not (FOLDER / name).is_file()] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_whole_and_needs_nothing_from_elsewhere(path: object) -> None:
    text = (FOLDER / str(path)).read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert len(text) < 60_000
    assert not re.search(r"url\(http|@import|<image|xlink:href=.http", text)


def test_a_window_shows_a_command_and_its_coloured_output() -> None:
    svg = terminal.as_svg("zslurm status", "\x1b[31mfailed\x1b[0m  <run>", 60)
    assert "ui-monospace" in svg
    assert "http://www.w3.org/2000/svg" in svg
    assert "failed" in svg
    assert "&lt;run&gt;" in svg


def test_bars_are_as_long_as_their_values_and_escape_names() -> None:
    svg = bars("a", "b", [Bar("<x>", [(1.0, 0), (1.0, 1)], "2"), Bar("y", [(4.0, 0)], "4")])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="20"', svg)]
    assert widths[0] == widths[1] == pytest.approx(widths[2] / 4, abs=0.1)
    assert "&lt;x&gt;" in svg
    ElementTree.fromstring(svg)


def test_an_unknown_picture_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 2
    assert "there are: recovery, " in capsys.readouterr().err

"""The documents name files, folders and rooms that exist, and docs/architecture.md names every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.house.source_figures import walks
from docs.tables.source import READ_BEFORE
from tests.checkout import DOCS, ROOT

FOLDERS = ("zslurm", "train", "kernels", "checkpoint_tools", "sbatch_templates", "tests", "benchmarks")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / folder / "README.md" for folder in FOLDERS), *DOCS.glob("*.md")]
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
_PATH = re.compile(rf"`((?:{'|'.join((*FOLDERS, 'docs'))})/[\w./-]*)`")
_WALK = re.compile(r"^## (Walk: [^\n]+)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)


def packages(folder: str) -> list[str]:
    """The packages directly inside a folder, as others import them."""
    prefix = "" if folder.startswith("zslurm") else "zslurm."
    inside = sorted(path.parent for path in (ROOT / folder).glob("*/__init__.py"))
    return [f"{prefix}{package.relative_to(ROOT)}".replace("/", ".") for package in inside]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_that_is_named_exists(document: Path) -> None:
    named = _PATH.findall(document.read_text(encoding="utf-8"))
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("folder", ["zslurm", "zslurm/aegis", "train"])
def test_every_room_is_named(folder: str) -> None:
    rooms = packages(folder)
    assert rooms
    assert [room for room in rooms if f"`{room}`" not in ARCHITECTURE] == []


@pytest.mark.parametrize(("title", "text"), _WALK.findall(ARCHITECTURE))
def test_a_walk_is_a_numbered_list_of_files(title: str, text: str) -> None:
    steps = re.findall(r"^(\d+)\. `([^`]+)` \S", text, re.MULTILINE)
    assert len(steps) >= 5, title
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len({path for _, path in steps}) == len(steps), "each file once: no way back"


@pytest.mark.parametrize("walk", ["a submission", "a save", "a fault from a log line to an action"])
def test_a_walk_is_at_most_half_as_long_as_before_the_move(walk: str) -> None:
    assert walks()[walk] <= READ_BEFORE[walk] / 2


def test_there_are_three_walks_and_a_glossary_without_a_word_twice() -> None:
    assert len(_WALK.findall(ARCHITECTURE)) == 3
    rows = ARCHITECTURE.partition("## Glossary")[2].splitlines()
    words = [word for row in rows if row.startswith("| ") for word in row.split(" | ")[0].strip("| ").split(", ")]
    assert len(words) > 50
    assert len(set(words)) == len(words)

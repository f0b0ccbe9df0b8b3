"""The documents name files and folders that exist, and docs/architecture.md names every package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
def test_every_package_is_named(folder: str) -> None:
    inside = packages(folder)
    assert inside
    assert [package for package in inside if f"`{package}`" not in ARCHITECTURE] == []


@pytest.mark.parametrize(("title", "text"), _WALK.findall(ARCHITECTURE + "\n## "))
def test_a_walk_is_a_numbered_list_of_files(title: str, text: str) -> None:
    steps = re.findall(r"^(\d+)\. `([^`]+)` \S", text, re.MULTILINE)
    assert len(steps) >= 5, title
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len({path for _, path in steps}) == len(steps), "each file once: no way back"


def test_the_page_fits_three_screens() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 150


def test_there_are_three_walks() -> None:
    assert len(_WALK.findall(ARCHITECTURE + "\n## ")) == 3


def test_the_glossary_has_no_word_twice() -> None:
    rows = (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()
    words = [word for row in rows if row.startswith("| ") for word in row.split(" | ")[0].strip("| ").split(", ")]
    assert len(words) > 50
    assert len(set(words)) == len(words)

"""The list of all pages, by the sections of the site: for people, and for programs that read (llmstxt.org)."""

from __future__ import annotations

import re
from pathlib import Path

from docs.site.pages import SECTIONS
from docs.tables.markdown import ROOT


def pages() -> str:
    """Return the pages of each section, with their titles."""
    return "".join(f"- {name}: {', '.join(map(_link, section))}\n" for name, section in SECTIONS)


def pages_for_programs() -> str:
    """Return the pages of each section from the root of the repository, each with its first sentence."""
    return "".join(f"## {name}\n\n{''.join(map(_item, section))}\n" for name, section in SECTIONS)


def _item(page: str) -> str:
    path = _path(page)
    title, _, text = path.read_text(encoding="utf-8").partition("\n")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paragraph = next(block for block in prose.split("\n\n") if block.strip()[:1] not in ("", "#", "|", "<", "!"))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    sentence = re.split(r"(?<=[.:])\s", plain)[0].rstrip(":.")
    return f"- [{title.strip('# ').rstrip()}]({path.relative_to(ROOT)}): {sentence}\n"


def commands_of_make() -> str:
    """Return what `make` does for somebody who changes the program."""
    rows = re.findall(r"^([a-z-]+):.*## (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return "".join(f"- `make {name}`: {about}\n" for name, about in rows)


def _path(page: str) -> Path:
    inside = ROOT / "docs" / page
    return inside if inside.exists() else ROOT / page


def _link(page: str) -> str:
    path = _path(page)
    place = page if path.parent != ROOT else f"../{page}"
    with path.open(encoding="utf-8") as text:
        return f"[{text.readline().strip('# ').rstrip()}]({place})"


TABLES = (pages, pages_for_programs, commands_of_make)

"""The list of all pages, by the sections of the site."""

from __future__ import annotations

from docs.site.pages import SECTIONS
from docs.tables.markdown import ROOT


def pages() -> str:
    """Return the pages of each section, with their titles."""
    return "".join(f"- {name}: {', '.join(map(_link, section))}\n" for name, section in SECTIONS)


def _link(page: str) -> str:
    inside = ROOT / "docs" / page
    path, place = (inside, page) if inside.exists() else (ROOT / page, f"../{page}")
    with path.open(encoding="utf-8") as text:
        return f"[{text.readline().strip('# ').rstrip()}]({place})"


TABLES = (pages,)

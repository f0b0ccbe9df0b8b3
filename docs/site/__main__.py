"""Build the documents as a site: `python -m docs.site DIRECTORY`, or `make site`.

The documents link to each other and to files of the repository, as its readers need it. In a copy of
them CONTRIBUTING.md and CHANGELOG.md are pages, index.md stands for README.md, and a link to any other file is its
path. Sphinx builds that copy and takes every warning, such as a broken link, as an error.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.site.pages import SECTIONS

ROOT = Path(__file__).parents[2]
TOP_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#|mailto:)[^)#\s]+)(?P<anchor>#[^)]*)?\)")
_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)


def linked(text: str, source: str) -> str:
    """Return a page whose links lead to pages of the site.

    Args:
        text: the page, in Markdown.
        source: its path in the repository, such as `docs/rails.md`.
    """
    here = posixpath.dirname(_place(source))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        if target == "README.md":
            target = "docs/index.md"
        if target in TOP_PAGES or (target.startswith("docs/") and target.endswith((".md", ".svg", ".png"))):
            return f"[{found['text']}]({posixpath.relpath(_place(target), here or '.')}{found['anchor'] or ''})"
        shown = found["text"]
        return shown if target in shown or "`" in shown else f"{shown} (`{target}`)"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _place(source: str) -> str:
    """Return where a file of the repository is in the copy."""
    return source.removeprefix("docs/")


def contents() -> str:
    """Return the table of contents, for Sphinx.

    Raises:
        SystemExit: a page is in no section.
    """
    pages = {_place(str(path.relative_to(ROOT))) for path in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    listed = {page for _, section in SECTIONS for page in section}
    if lost := sorted(pages.union(TOP_PAGES) - listed):
        raise SystemExit(f"docs/site/pages.py: no section has {', '.join(lost)}")
    lines = [""]
    for name, section in SECTIONS:
        lines += ["```{toctree}", ":hidden:", f":caption: {name}", *section, "```", ""]
    return "\n".join(lines)


def copy_sources(to: Path) -> None:
    """Copy every page and picture, with links as the site needs them."""
    for path in [*(ROOT / "docs").rglob("*"), *(ROOT / name for name in TOP_PAGES)]:
        source = str(path.relative_to(ROOT))
        if path.suffix not in (".md", ".svg", ".png"):
            continue
        place = to / _place(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copy(path, place)
            continue
        text = linked(path.read_text(encoding="utf-8"), source)
        place.write_text(text + (contents() if source == "docs/index.md" else ""), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Build the site; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m docs.site DIRECTORY", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as copy:
        copy_sources(Path(copy))
        shutil.copy(Path(__file__).with_name("conf.py"), copy)
        command = ["sphinx-build", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
        return subprocess.run([sys.executable, "-m", "sphinx", *command[1:], copy, arguments[0]]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

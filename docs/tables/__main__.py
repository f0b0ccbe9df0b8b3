"""Write the tables of the documents that come from the program: `python -m docs.tables`, or `make docs`.

A document has a pair of comments where a table belongs, and this program writes everything between them:

    <!-- table: aegis-settings -->
    ...
    <!-- end of table -->

With `--check` nothing is written: it names every table that differs from what the program gives, and exits with 1.
`make lint` runs that, so it holds in CI as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from docs.tables import (
    aegis,
    clusters,
    failures,
    flagship,
    measured,
    python,
    recipes,
    reference,
    site,
    source,
    versions,
)
from docs.tables.markdown import ROOT

DOCUMENTS = [ROOT / "llms.txt", *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_TABLE = re.compile(
    r"(?P<begin><!-- table: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<end><!-- end of table -->)", re.S
)

_SUBJECTS = (
    aegis,
    clusters,
    failures,
    recipes,
    flagship,
    measured,
    python,
    reference,
    site,
    source,
    versions,
)
TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function for subject in _SUBJECTS for function in subject.TABLES
}
"""By the name in the documents."""


def rewritten(text: str) -> str:
    """Return a document with its tables as the program gives them.

    Raises:
        SystemExit: the document names a table that does not exist.
    """

    def write(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise SystemExit(f"there is no table called {name}; there are: {', '.join(TABLES)}")
        return found["begin"] + TABLES[name]() + found["end"]

    return _TABLE.sub(write, text)


def outdated() -> dict[Path, str]:
    """Return the documents that `main` would change, with their new text."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    return {path: new for path, text in texts.items() if (new := rewritten(text)) != text}


def main(arguments: list[str]) -> int:
    """Write the tables, or with `--check` name the documents whose tables are outdated; return the exit code."""
    changes = outdated()
    for path, text in changes.items():
        if arguments == ["--check"]:
            print(
                f"{path.relative_to(ROOT)}: a table is not what the program gives; run `make docs`",
                file=sys.stderr,
            )
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if changes and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

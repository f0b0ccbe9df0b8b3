"""docs/aegis.md and docs/run-directory.md say what the program has: every setting, its default, every event.

`python -m tests.test_aegis_doc` prints the table of settings anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.checkout import DOCS
from tests.config.run_files import PHASES, resolve_text
from zslurm.config.aegis import AegisSection, NotifySettings
from zslurm.run.events import KINDS

_ACTIONS = {"submit", "requeue", "exclude", "cancel", "hold", "release", "successor", "notify_test"}
"""Not the supervisor's: they stand in submissions.jsonl, or nowhere."""


def settings(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """A line of the table for every setting below a section."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield f"| `{prefix}{name}` | {_shown(value)} | {field.description} |"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) and value < 1e6 else f"`{value}`"


def test_the_table_of_settings_is_that_of_the_program() -> None:
    written = [
        line for line in (DOCS / "aegis.md").read_text().splitlines() if re.match(r"\| `[a-z_.]+` \| ", line)
    ]
    assert written == list(settings(AegisSection())), "python -m tests.test_aegis_doc prints the table"


def test_the_run_files_in_it_are_right(tmp_path: Path) -> None:
    found = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "aegis.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    for text in found:
        resolve_text(tmp_path, PHASES + text)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - _ACTIONS))
def test_every_event_is_described(kind: str) -> None:
    listed = (DOCS / "run-directory.md").read_text().partition("## events.jsonl")[2].partition("\n## ")[0]
    assert re.search(rf"^\|[^|]*`{kind}`", listed, re.MULTILINE)


def test_the_events_that_are_told_by_default_exist() -> None:
    assert set(NotifySettings().events) <= set(KINDS) - _ACTIONS


if __name__ == "__main__":
    print("\n".join(settings(AegisSection())))

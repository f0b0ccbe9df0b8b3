"""docs/aegis.md and docs/run-directory.md: the run files in them are valid, and every event is described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import DOCS
from tests.config.run_files import PHASES, resolve_text
from zslurm.config.aegis import NotifySettings
from zslurm.run.events import KINDS

_ACTIONS = {
    "submit",
    "requeue",
    "exclude",
    "cancel",
    "hold",
    "release",
    "move",
    "readmit",
    "successor",
    "score",
    "not_released",
    "notify_test",
}
"""The supervisor writes none of these: they are in submissions.jsonl, or are only sent to a hook."""


def test_the_run_files_in_it_are_right(tmp_path: Path) -> None:
    found = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "aegis.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 3
    for text in found:
        resolve_text(tmp_path, PHASES + text)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - _ACTIONS))
def test_every_event_is_described(kind: str) -> None:
    listed = (DOCS / "run-directory.md").read_text().partition("## events.jsonl")[2].partition("\n## ")[0]
    assert re.search(rf"^\|[^|]*`{kind}`", listed, re.MULTILINE)


def test_the_events_that_are_told_by_default_exist() -> None:
    assert set(NotifySettings().events) <= set(KINDS) - _ACTIONS

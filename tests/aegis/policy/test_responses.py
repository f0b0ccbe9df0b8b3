"""The table of treatments: it is consistent, and docs/policy.md shows it as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.checkout import DOCS
from zslurm.aegis.policy.policy import _MOST_REFUSALS
from zslurm.aegis.policy.responses import REMARKS, TREATMENTS, Treatment, treatment_of
from zslurm.config.aegis import AegisSection

DOCUMENT = DOCS / "policy.md"
WHILE_RUNNING = {"give up": "ends it", "tolerate": "ends it if it lasts", "record": "goes on"}
EXCLUDES = {1: "at once", 2: "the 2nd time", 3: "the 3rd time", None: "never"}
THEN = {
    "retry": "start again",
    "wait": "wait, then start again",
    "ask again": f"wait, try up to {_MOST_REFUSALS} times, then stop",
    "test": "start again; test the GPU",
    "stop": "stop",
    "gpu_oom": "`aegis.gpu_oom`",
    "requeue": "requeue",
    "time limit": "requeue",
    "slurm": "leave it to Slurm",
}


def row(kind: str, treatment: Treatment) -> list[str]:
    """A line of the document's table."""
    excludes = EXCLUDES[treatment.exclude_after]
    if treatment.lasting:
        excludes += ", or if it lasts"
    if treatment.must_leave:
        excludes += ", or stops"
    cells = [treatment.words, WHILE_RUNNING[treatment.while_running], excludes, THEN[treatment.then]]
    return [f"`{kind}`", *cells]


def test_the_document_shows_the_table() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert shown == [row(kind, treatment) for kind, treatment in TREATMENTS.items()]


def test_the_document_names_what_never_takes_the_blame() -> None:
    (paragraph,) = [p for p in DOCUMENT.read_text().split("\n\n") if p.startswith("Never to blame")]
    assert re.findall(r"`(\w+)`", paragraph) == list(REMARKS)


def test_the_settings_that_the_document_names_exist() -> None:
    for name in re.findall(r"`aegis\.([a-z_.]+)(?:: \w+)?`", DOCUMENT.read_text()):
        section: Any = AegisSection()
        for part in name.split("."):
            section = getattr(section, part)


@pytest.mark.parametrize("kind", TREATMENTS)
def test_a_treatment_contradicts_itself_nowhere(kind: str) -> None:
    treatment = TREATMENTS[kind]
    assert treatment.words
    assert treatment.exclude_after == 1 or not treatment.certain
    assert treatment.exclude_after == 1 or treatment.then == "requeue" or not treatment.must_leave
    assert treatment.while_running == "tolerate" or not treatment.lasting
    assert treatment.then == "retry" or treatment.exclude_after is None


def test_a_kind_that_nobody_knows_is_treated_mildly() -> None:
    assert treatment_of("gpu_on_fire") == Treatment("gpu on fire")

"""Labelled lines of logs: recorded ones with their sources, and further forms of the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Sample(NamedTuple):
    """A line and the class of the fault that it tells of; `benign` for none."""

    kind: str
    line: str


def _recorded() -> list[Sample]:
    """The development set: log_samples.jsonl."""
    rows = map(json.loads, (HERE / "log_samples.jsonl").read_text().splitlines())
    return [Sample(row["class"], row["line"]) for row in rows]


def _forms() -> list[Sample]:
    """Further forms: log_forms.txt."""
    lines = (HERE / "log_forms.txt").read_text().splitlines()
    return [Sample(*line.split("|", 1)) for line in lines if not line.startswith("#")]


RECORDED = _recorded()
FORMS = _forms()
EVERY = RECORDED + FORMS

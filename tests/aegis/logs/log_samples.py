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


def _rows(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (HERE / file).read_text().splitlines()]


def _recorded(file: str) -> list[Sample]:
    return [Sample(row["class"], row["line"]) for row in _rows(file)]


def _blind(file: str) -> list[Sample]:
    return [Sample(row.get("first_class", row["class"]), row["line"]) for row in _rows(file)]


def _forms(file: str) -> list[Sample]:
    lines = (HERE / file).read_text().splitlines()
    return [Sample(*line.split("|", 1)) for line in lines if not line.startswith("#")]


RECORDED = _recorded("log_samples.jsonl")
"""The development set."""
FURTHER = _recorded("log_samples_further.jsonl")
"""Lines with their sources, gathered when the table of signatures was finished (benchmarks/aegis/classify.py)."""
_BATCH_FILES = tuple(f"log_samples_batch{number}.jsonl" for number in range(1, 9))
BATCHES = tuple(map(_recorded, _BATCH_FILES))
"""Lines after the formats of drivers, RCCL and Slurm, and from tests of tools (benchmarks/aegis/classify.py)."""
BATCHES_BLIND = tuple(map(_blind, _BATCH_FILES))
"""The same lines with the classes that they were given before they were scored.

A few of them were corrected after that (`first_class` holds the first one), because the table gives such lines
another class already. The recall of rules that had not seen a batch is measured on these.
"""
FORMS = _forms("log_forms.txt")
"""Further forms of the messages that are known word for word."""
COMPOSED = _forms("log_forms_composed.txt")
"""Forms that are known by a driver's name and a verb."""
EVERY = RECORDED + FORMS + COMPOSED + FURTHER + [sample for batch in BATCHES for sample in batch]

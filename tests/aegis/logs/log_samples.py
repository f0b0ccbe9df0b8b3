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


def _recorded(file: str) -> list[Sample]:
    rows = map(json.loads, (HERE / file).read_text().splitlines())
    return [Sample(row["class"], row["line"]) for row in rows]


def _forms(file: str) -> list[Sample]:
    lines = (HERE / file).read_text().splitlines()
    return [Sample(*line.split("|", 1)) for line in lines if not line.startswith("#")]


RECORDED = _recorded("log_samples.jsonl")
"""The development set."""
FURTHER = _recorded("log_samples_further.jsonl")
"""Lines with their sources, gathered when the table of signatures was finished; see benchmarks/classify.py."""
BATCHES = tuple(_recorded(f"log_samples_batch{number}.jsonl") for number in (1, 2, 3, 4, 5, 6))
"""Lines after the formats of drivers, RCCL and Slurm, and from other tools' tests; see benchmarks/classify.py."""
FORMS = _forms("log_forms.txt")
"""Further forms of the messages that are known word for word."""
COMPOSED = _forms("log_forms_composed.txt")
"""Forms that are known by a driver's name and a verb."""
EVERY = RECORDED + FORMS + COMPOSED + FURTHER + [sample for batch in BATCHES for sample in batch]

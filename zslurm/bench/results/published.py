"""Figures of others from published.yaml as lines next to a result: always with their source."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from zslurm.bench.result import BenchResult


class Published(BaseModel):
    """A figure that others published.

    Attributes:
        benchmark: of `zslurm bench` that measures the same.
        where: columns of rows next to which it is shown; empty: next to any.
        what: what was measured, and on what.
        value, unit: the figure.
        source: who published it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: str
    where: dict[str, Any]
    what: str
    value: float
    unit: str
    source: str

    @property
    def line(self) -> str:
        """Return it in one line."""
        return f"others' figure: {self.what}: {self.value:,g} {self.unit} ({self.source})"


@cache
def published() -> tuple[Published, ...]:
    """Return all figures."""
    text = resources.files("zslurm.bench.results").joinpath("published.yaml").read_text(encoding="utf-8")
    return tuple(TypeAdapter(list[Published]).validate_python(yaml.safe_load(text)))


def lines_for(result: BenchResult) -> list[str]:
    """Return the figures that belong next to a result on GPUs, a line each; next to one of CPUs there are none."""
    if result.machine.device != "cuda":
        return []
    return [
        figure.line
        for figure in published()
        if figure.benchmark == result.benchmark
        and any(all(row.get(key) == value for key, value in figure.where.items()) for row in result.rows)
    ]

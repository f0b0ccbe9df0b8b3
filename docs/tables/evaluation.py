"""Figures of evaluation, from its benchmark."""

from __future__ import annotations

import json
from typing import Any

from docs.tables.markdown import RESULTS, table

_NOT_YET = "not yet measured\n"


def _result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def evaluation_scores() -> str:
    """Return the scores beside those of lm-evaluation-harness, and how long both take."""
    body = _result("evaluation_scores")
    if body is None:
        return _NOT_YET
    rows = []
    for task in body["tasks"]:
        for number, (name, score) in enumerate(task["scores"].items()):
            faster = ", ".join(f"{value} times ({peer})" for peer, value in task["times_faster"].items())
            rows.append(
                (
                    f"`{task['task']}`" if not number else "",
                    str(task["documents"]) if not number else "",
                    f"`{name}`",
                    f"{score['zslurm']:.5g}",
                    f"{score['lm_eval']:.5g}",
                    f"{score['points']:g}",
                    faster if not number else "",
                )
            )
    return table(("task", "documents", "metric", "zslurm", "lm_eval", "difference, points", "faster than"), rows)


TABLES = (evaluation_scores,)

"""The figures of a trial, and one score for a contender."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from .trial import Trial


def score(trial: Trial) -> dict[str, Any]:
    """Return the figures of a trial.

    `ettr` is the effective training time ratio: the steps that are kept times the contender's median step, over
    the time from the first step to the end. `first_new_step_s` is the time from the last fault to the end of the
    next step of any rank, `all_ranks_s` until every rank has made one. `steps_lost` were computed again.
    `nodes_idle` are the nodes of the job on which no rank trains.
    """
    steps = [row for row in trial.rows if row["moment"] == "step"]
    starts = [row for row in trial.rows if row["moment"] == "start"]
    faults = [row for row in trial.rows if row["moment"] == "fault"]
    struck = [*(float(row["time"]) for row in faults), *(_struck_at(trial, each) for each in trial.struck)]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in steps:
        by_step.setdefault(row["step"], []).append(row)
    gaps = [
        later["time"] - row["time"]
        for rank in {row["rank"] for row in steps}
        for row, later in pairwise(row for row in steps if row["rank"] == rank)
        if later["step"] == row["step"] + 1 and later["pid"] == row["pid"]
    ]
    kept = max(by_step, default=0)
    losses = [row["loss"] for row in by_step.get(kept, [])]
    figures: dict[str, Any] = {
        "contender": trial.contender.name,
        "plan": trial.plan.name,
        "outcome": _outcome(trial, starts, all(map(math.isfinite, losses))),
        "kept_steps": kept,
        "steps_lost": sum(max(0, _times(rows) - 1) for rows in by_step.values()),
        "user_actions": trial.actions,
        "nodes_idle": trial.contender.nodes - len({row["rank"] for row in starts}),
        "wrong_exclusions": sorted(trial.excluded - _guilty(trial)),
        "starts": len(starts),
        "took_s": round(trial.ended - trial.began, 1),
    }
    if gaps and steps:
        end = steps[-1]["time"] if trial.over else trial.ended
        figures["ettr"] = round(min(1.0, kept * statistics.median(gaps) / (end - steps[0]["time"])), 3)
    if struck and trial.plan.completes:
        figures |= _ways_back(steps, max(struck))
    figures["final_loss"] = next((loss for loss in losses if math.isfinite(loss)), None)
    figures["is_finite"] = all(map(math.isfinite, losses)) if losses else None
    return figures | {"error": trial.error, "not_injected": trial.not_injected}


def _struck_at(trial: Trial, fault: dict[str, Any]) -> float:
    """Return when a fault from outside happened; a time limit is there all along, until it ends the steps."""
    if fault["fault"] != "time_limit":
        return float(fault["time"])
    starts = (row["time"] for row in trial.rows if row["moment"] == "start" and row["time"] > fault["time"])
    end = next(starts, float(fault["time"]))
    return max((row["time"] for row in trial.rows if row["moment"] == "step" and row["time"] < end), default=end)


def _outcome(trial: Trial, starts: Sequence[dict[str, Any]], is_finite: bool) -> str:
    if trial.error:
        return "not started"
    if trial.not_injected:
        return "not tried"
    if trial.over and not is_finite:
        return "not a number"
    if trial.over:
        return "survived" if not trial.actions else "survived with help"
    if not starts:
        return "not started"
    if not trial.plan.completes:
        return "stopped" if trial.is_left else "restarts for ever"
    return "ended" if trial.is_left else "hangs"


def _times(rows: Sequence[dict[str, Any]]) -> int:
    """Return how often a step was computed: by the rank that did it most often."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["rank"]] = counts.get(row["rank"], 0) + 1
    return max(counts.values())


def _guilty(trial: Trial) -> set[str]:
    """Return the nodes that had a fault, and whose exclusion is right."""
    slow = {row["node"] for row in trial.rows if row["moment"] == "fault" and row["fault"] in ("slow_rank", "nan")}
    return slow | {each["node"] for each in trial.struck if each["fault"] in ("node_killed", "link_down")}


def _ways_back(steps: Sequence[dict[str, Any]], fault: float) -> dict[str, Any]:
    """Return the seconds from the last fault until some rank, and until every rank, has made another step."""
    ranks = {row["rank"] for row in steps}
    before = max((row["step"] for row in steps if row["time"] <= fault), default=0)
    first: dict[int, float] = {}
    for row in steps:
        # Another rank may still report the step in which the fault happened.
        if row["time"] > fault and (row["step"] > before or row["time"] > fault + 1.0):
            first.setdefault(row["rank"], row["time"] - fault)
    if not first:
        return {}
    everybody = round(max(first.values()), 2) if len(first) == len(ranks) else None
    return {"first_new_step_s": round(min(first.values()), 2), "all_ranks_s": everybody}


def summary(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each contender, the best one first: by what it survives without help, then by ETTR."""
    rows = []
    for name in dict.fromkeys(row["contender"] for row in figures):
        tried = [row for row in figures if row["contender"] == name and row["outcome"] != "not tried"]
        right = [row for row in tried if row["outcome"] in ("survived", "stopped")]
        ratios = [row.get("ettr", 0.0) if row in right else 0.0 for row in tried if row["outcome"] != "stopped"]
        rows.append(
            {
                "contender": name,
                "trials": len(tried),
                "survived": len(right),
                "ettr": round(statistics.fmean(ratios), 3) if ratios else None,
                "steps_lost": _median(row["steps_lost"] for row in right),
                "first_new_step_s": _median(row.get("first_new_step_s") for row in right),
                "all_ranks_s": _median(row.get("all_ranks_s") for row in right),
                "user_actions": sum(row["user_actions"] for row in tried),
                "wrong_exclusions": sum(len(row["wrong_exclusions"]) for row in tried),
                "nodes_idle": max((row["nodes_idle"] for row in tried), default=0),
            }
        )
    return sorted(rows, key=lambda row: (-row["survived"] / max(1, row["trials"]), -(row["ettr"] or 0.0)))


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(statistics.median(numbers), 2) if numbers else None

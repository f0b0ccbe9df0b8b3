"""Run directories for reports: written event by event, with metrics that have every field of a real run's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.run.stories import Story
from zslurm.train.evaluation.token_classes import TOKEN_CLASSES
from zslurm.train.jsonl import JsonLinesWriter

PARTS = ("data", "forward", "backward", "reduce", "optimizer", "gather", "checkpoint", "other")
STEP_S = 2.0
LAYERS, CLASSES = 4, 5


def step_row(step: int, attempt: int, time: float, *, loss: float | None = None) -> dict[str, Any]:
    """A line of a step as the trainer writes it, which ended at `time`."""
    split = dict.fromkeys(PARTS, 0.1) | {"forward": 0.6, "backward": 0.8, "checkpoint": 0.0}
    row: dict[str, Any] = {
        "kind": "step",
        "attempt": attempt,
        "step": step,
        "tokens": step * 4096,
        "phase": "pretrain",
        "loss": 3 + 5 * math.exp(-step / 300) + 0.05 * math.sin(step) if loss is None else loss,
        "lr": 1e-3 * min(1, step / 20),
        "grad_norm": 1 + 1 / step,
        "tokens_per_s": 2048.0,
        "tokens_per_s_per_rank": 1024.0,
        "tflops_per_rank": 0.01,
        "mfu": 0.4,
        "step_time_s": STEP_S,
        "time_split_s": split,
        "memory_rss_bytes": 500 << 20,
        "skip_share": 0.1,
        "load_entropy": 0.9,
        "time": time,
    }
    if step % 10 == 0:
        row["load_entropy_by_layer"] = [0.9 + 0.02 * layer for layer in range(LAYERS)]
        row["load_shares"] = [[1 / CLASSES] * CLASSES for _ in range(LAYERS)]
    return row


class TimedStory(Story):
    """A story whose clock is set by hand, so that where its time went is known."""

    def submitted_at(self, when: float, job_id: str = "local-1", *, process: int | None = None) -> TimedStory:
        """The launcher took it then (UNIX seconds)."""
        self.submitted(job_id, process=process)
        rows = [json.loads(line) for line in self.run.submissions.read_text().splitlines()]
        self.run.submissions.write_text("".join(json.dumps(row | {"time": when}) + "\n" for row in rows))
        self.clock = when
        return self

    def at(self, seconds: float) -> TimedStory:
        """It is this long after the submission."""
        self.clock = 1_780_000_000.0 + seconds - 1
        return self

    def steps(self, numbers: Iterable[int], attempt: int = 1) -> TimedStory:
        """Took these steps, the first of which begins now, without a break."""
        begin = self.clock + 1
        with JsonLinesWriter(self.run.metrics) as lines:
            for index, step in enumerate(numbers, start=1):
                lines.append(step_row(step, attempt, begin + index * STEP_S))
        return self

    def saved(self, step: int, attempt: int = 1) -> TimedStory:
        with JsonLinesWriter(self.run.metrics) as lines:
            row = {"kind": "checkpoint", "attempt": attempt, "step": step, "state": "COMMITTED", "bytes": 1 << 20}
            lines.append(row | {"seconds": 0.5, "stall_s": 0.01, "best_step": None, "time": self._tick()})
        return self


def submitted_at_zero(directory: Path) -> TimedStory:
    """A run that was submitted at second 0 of its own clock."""
    return TimedStory(directory).submitted_at(1_780_000_000.0)


def failed_once(directory: Path) -> TimedStory:
    """Two attempts: 10 s queue, 20 s start, 100 steps of 2 s, the last 20 lost, 30 s until the end is noticed.

    After 5 s the second begins, takes 15 s to start, continues from step 81 to 160, and ends after 5 s.
    """
    story = submitted_at_zero(directory)
    story.at(10).started(1)
    story.at(30).steps(range(1, 101))
    story.at(190).saved(80)
    fault = {"kind": "gpu_ras_uncorrectable", "role": "root", "node": "node1", "gpu": "3", "line": "uncorrectable"}
    story.at(250).event("fault_detected", attempt=1, **fault)
    cause = {"message": "GPU 3 reported an uncorrectable error", "node": "node1", "rank": 1, "step": 100}
    story.at(260).event("attempt_ended", attempt=1, outcome="failed", exit_code=1, cause=cause)
    story.at(261).event("decision", attempt=1, action="restart", mode="act", committed_step=80, nodes=["node0"])
    story.at(265).started(2)
    story.at(280).steps(range(81, 161), attempt=2)
    story.at(440).saved(160, attempt=2)
    story.at(445).event("attempt_ended", attempt=2, outcome="completed", exit_code=0, cause=None)
    story.at(445).event("run_ended", outcome="completed", exit_code=0, cause=None)
    return story


def routed(
    story: TimedStory,
    *,
    layers: int = LAYERS,
    classes: int = CLASSES,
    names: int = 3,
    steps: Sequence[int] = (50, 100),
) -> TimedStory:
    """Evaluations that counted the routing, and the matrices of the last one."""
    generator = np.random.default_rng(3)
    with JsonLinesWriter(story.run.metrics) as lines:
        for step in steps:
            summary = {
                "specialisation": [0.1] * layers,
                "overlap": [0.5] * layers,
                "followed": [0.2] * (layers - 1),
            }
            lines.append({"kind": "routing", "attempt": 1, "step": step, "tokens": 4096, **summary, "time": 1.0})
    matrices = {
        "step": steps[-1],
        "tokens": 4096,
        "classes": list(TOKEN_CLASSES[:names]),
        "specialisation": [0.1] * (layers - 1) + [0.25],
        "distance": generator.random((layers, names)).round(4).tolist(),
        "shares": generator.random((layers, names, classes)).round(4).tolist(),
        "overlap": [[[None if e == f == 1 else 0.4 for e in range(classes)] for f in range(classes)]] * layers,
        "followed": [0.2] * (layers - 1),
    }
    story.run.routing.write_text(json.dumps(matrices))
    return story

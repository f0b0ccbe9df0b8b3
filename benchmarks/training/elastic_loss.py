"""The loss of a run across an elastic change: stopped on four ranks, continued on three, next to one that was not.

The same small model, data and seed twice. One run trains on four ranks to the end. The other is asked to save and
stop on its way, and continues from its checkpoint on three ranks at the same global batch: ranks then have unlike
shares of the microbatches. A step's result does not depend on the number of ranks beyond the order of sums
(docs/training.md), so in fp32 the curves lie on each other; the largest difference is in the result.
"""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.cli.trained import CONTEXT, MODEL, TEXT
from tests.train.ranks import Ranks, train_on
from tests.waiting import wait_for
from zslurm.run.metrics.columns import read_metrics
from zslurm.train.data.build.build import build

STEPS = 120
STOP_AFTER = 50
_INTERRUPTED = 75


def _prepare(run: Path, data: Path, steps: int) -> Path:
    run.mkdir(parents=True)
    phase = {"tokens": steps * 12 * CONTEXT, "context": CONTEXT, "global_batch": 12, "micro_batch": 1, "lr": 1e-2}
    config: dict[str, Any] = {
        "run": {"name": run.name},
        "model": MODEL,
        "data": {"path": str(data)},
        "phases": [phase | {"rope_base": 5000.0}],
        "parallel": {"dtype": "fp32", "threads": 1},
        "checkpoint": {"every_steps": steps},
    }
    (run / "config.json").write_text(json.dumps(config))
    return run


def _ranks_until(run: Path, ranks: int, step: int) -> None:
    """Train until a number of steps are taken, then let the ranks save and stop.

    Raises:
        RuntimeError: they did not end as ranks do that were asked to stop.
    """
    started = Ranks(run, ranks)
    wait_for(lambda: len(read_metrics(run).steps.get("step", ())) >= step, f"{ranks} ranks to take {step} steps")
    started.send_signal(signal.SIGUSR2)
    done = started.wait()
    if done.returncode != _INTERRUPTED:
        raise RuntimeError(f"the ranks ended with {done.returncode}: {done.stderr[-2000:]}")


def run(steps: int = STEPS) -> None:
    """Measure and write results/elastic_loss.json."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "texts").mkdir()
        for number in range(8):
            (directory / "texts" / f"{number}.txt").write_text(TEXT * 120)
        build([directory / "texts"], directory / "data", vocab_size=400)
        whole = _prepare(directory / "whole", directory / "data", steps)
        elastic = _prepare(directory / "elastic", directory / "data", steps)
        train_on(whole, 4)
        _ranks_until(elastic, 4, STOP_AFTER)
        changed_at = int(read_metrics(elastic).steps["step"][-1])
        train_on(elastic, 3)
        losses = {path.name: read_metrics(path).steps["loss"].tolist() for path in (whole, elastic)}
        apart = [abs(a - b) / a for a, b in zip(losses["whole"], losses["elastic"], strict=True)]
        write_result(
            "elastic_loss",
            {
                "what": "loss of each step on 4 ranks, and on 4 and from a checkpoint on 3, in fp32",
                "steps": steps,
                "changed_after_step": changed_at,
                "largest_relative_difference": {
                    "before": max(apart[:changed_at]),
                    "after": max(apart[changed_at:]),
                },
                "losses": {run: [round(loss, 5) for loss in values] for run, values in losses.items()},
            },
        )

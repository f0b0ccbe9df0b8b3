"""What must be true of a run after a fault, whichever it was."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.harness import SAVE_EVERY, STEPS, FaultRun
from tests.train.curves import nudge
from tests.train.recorded_curve import distance
from tests.waiting import wait_for
from train.config import load_train_config
from train.jsonl import read_jsonl
from train.loop import Trainer
from train.parallel.world import open_world
from train.stop import StopRequest
from zslurm.slurm.hostlist import expand

SPREAD = 4.0
"""How much further from the undisturbed curve than the furthest twin a run may be that went on with fewer
nodes; the same as for recorded curves."""
TWINS = 4
SAVE_STEPS = 2
"""Steps that training makes while a checkpoint is written: a failure then costs these on top of an interval."""


def curve(run: Path) -> list[float]:
    """The loss of each step, of its last attempt."""
    losses: dict[int, float] = {}
    for row in read_jsonl(run / "metrics.jsonl"):
        if row["kind"] == "step":
            losses[row["step"]] = row["loss"]
    return [losses[step] for step in sorted(losses)]


def spread_of_twins(run: Path, corpus: Path, place: Path) -> float:
    """How far the furthest run ends up of some whose weights were moved by one unit in the last place at first.

    They train in this process, on one rank; the distance is that of recorded curves.
    """
    base = _train(run, corpus, place / "base", None)
    return max(distance(_train(run, corpus, place / f"twin-{seed}", seed), base) for seed in range(TWINS))


def _train(run: Path, corpus: Path, directory: Path, seed: int | None) -> list[float]:
    directory.mkdir(parents=True)
    settings = json.loads((run / "config.json").read_text())
    settings["data"]["path"] = str(corpus)
    (directory / "config.json").write_text(json.dumps(settings))
    config = load_train_config(directory / "config.json")
    with open_world(config.parallel) as world:
        trainer = Trainer(directory, config, world, StopRequest())
        if seed is not None:
            nudge(trainer.shards.master, seed)
            trainer.shards.gather_weights()
        trainer.run()
    return curve(directory)


def same_curve(run: FaultRun, undisturbed: list[float]) -> None:
    """Every step was taken, and its loss is to the last bit that of the undisturbed run."""
    losses = curve(run.path)
    assert len(losses) == STEPS
    differing = [step + 1 for step in range(STEPS) if losses[step] != undisturbed[step]]
    assert not differing, f"the loss differs first at step {differing[0]}"


def close_curve(run: FaultRun, undisturbed: list[float], spread: float) -> None:
    """Every step was taken, and the curve is as near to the undisturbed one as that of twins."""
    losses = curve(run.path)
    assert len(losses) == STEPS
    assert distance(losses, undisturbed) <= SPREAD * spread


def lost_steps(run: FaultRun) -> list[int]:
    """For each attempt that took over: steps that had been taken, and had to be taken again."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for row in run.metrics("step"):
        first.setdefault(row["attempt"], row["step"])
        last[row["attempt"]] = row["step"]
    attempts = sorted(first)
    return [last[before] - (first[after] - 1) for before, after in pairwise(attempts)]


def loses_little(run: FaultRun, intervals: int = 1) -> None:
    """No attempt's steps are lost but those since the newest checkpoint."""
    assert all(lost <= intervals * SAVE_EVERY + SAVE_STEPS for lost in lost_steps(run)), lost_steps(run)


def excluded(run: FaultRun) -> set[str]:
    """Nodes that were excluded."""
    by_us = [event["nodes"] for event in run.events("nodes_excluded")]
    by_slurm = [event["excluded"] for event in run.events("requeued") if event.get("excluded")]
    return {node for nodes in by_us + by_slurm for node in names(nodes)}


def avoids_excluded(run: FaultRun) -> None:
    """No attempt is started on a node that was excluded before."""
    avoided: set[str] = set()
    for event in run.events("nodes_excluded", "attempt_started"):
        nodes = set(names(event["nodes"]))
        if event["event"] == "nodes_excluded":
            avoided |= nodes
        else:
            assert not nodes & avoided, f"attempt {event['attempt']} runs on {sorted(nodes & avoided)}"


def names(nodes: str | list[str]) -> list[str]:
    """Nodes of an event, which has them as a list or as Slurm's word for it."""
    return expand(nodes) if isinstance(nodes, str) else list(nodes)


def actions(run: FaultRun, *, on_faults: bool = False) -> list[str]:
    """What was decided, in order; not that a run which is complete is finished.

    Args:
        run: the run.
        on_faults: without the attempts that Slurm itself would not start, its controller being away or just back.
    """
    decisions = [event for event in run.events("decision") if event["action"] != "finish"]
    if on_faults:
        of_slurm = ("slurm_control_plane", "slurm_step_refused")
        decisions = [event for event in decisions if (event.get("root") or {}).get("kind") not in of_slurm]
    return [event["action"] for event in decisions]


def nothing_is_left(run: FaultRun) -> None:
    """Ranks and agents are gone; those of each attempt were before the next began."""
    left: Any = [(event["attempt"], event["left"]) for event in run.events("attempt_cleared") if event["left"]]
    assert not left, f"processes were left when the next attempt began: {left}"
    wait_for(lambda: not run.left_over(), f"processes of {run.name} to be gone")

"""What must be true of a run after a fault, whichever it was."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.harness import SAVE_EVERY, STEPS, FaultRun
from tests.train.loop.curves import nudge
from tests.train.loop.recorded_curve import distance
from tests.waiting import wait_for
from zslurm.slurm.hostlist import expand
from zslurm.train.config import load_train_config
from zslurm.train.jsonl import read_jsonl
from zslurm.train.parallel.world import open_world
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

SPREAD = 4.0
"""How much further from the undisturbed curve than the furthest twin a run may be that continued with fewer
nodes; the same as for recorded curves."""
TWINS = 4
JOB_IS_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
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
        trainer = open_trainer(directory, config, world, StopRequest())
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
    """Ranks, agents and helper jobs are gone; ranks of each attempt were before the next began."""
    left: Any = [(event["attempt"], event["left"]) for event in run.events("attempt_cleared") if event["left"]]
    assert not left, f"processes were left when the next attempt began: {left}"
    wait_for(lambda: not run.left_over(), f"processes of {run.name} to be gone")
    if helpers := [event["helper"] for event in run.events("helper_queued")]:
        command = ["squeue", "--noheader", "-o", "%i", f"--jobs={','.join(helpers)}"]
        wait_for(lambda: not run.cluster.run(command, check=False).stdout.strip(), "helper jobs to be gone")


# --- of two faults at a time ------------------------------------------------------------------------------


def wait_until_settled(run: FaultRun) -> None:
    """Wait for the end of the run; a job that was requeued is started at once.

    Raises:
        AssertionError: the job is over, and the run has come to no end; or two supervisors live.
    """
    over = 0

    def settled() -> bool:
        nonlocal over
        if run.ended() is not None:
            return True
        assert len(supervisors := run.supervisors()) <= 1, f"supervisors: {supervisors}"
        run.hasten()
        # A job that is being requeued is over for a moment.
        over = over + 1 if run.job_state() in JOB_IS_OVER else 0
        assert over < 10 or run.ended() is not None, f"the job is over ({run.job_state()}), the run is not"
        return False

    wait_for(settled, f"{run.name} to end", deadline_s=600.0, every_s=0.5)


def is_gone_for_good(run: FaultRun) -> None:
    """The job ends, and Slurm does not start it again."""
    wait_for(
        lambda: run.job_state() in JOB_IS_OVER, f"the job of {run.name} to end", deadline_s=420.0, every_s=0.5
    )
    assert requeues(run) == 0


def nodes_are_attributed(
    run: FaultRun, guilty: list[set[str]], excludes: tuple[bool, bool], leaves: tuple[bool, bool]
) -> None:
    """No node is excluded but those to blame; those that must be are, and the run ends without what is broken."""
    there = excluded(run)
    assert there <= set().union(*guilty), f"excluded: {sorted(there)}; to blame: {guilty}"
    must: set[str] = set().union(*(nodes for nodes, needed in zip(guilty, excludes, strict=True) if needed))
    assert must <= there, f"excluded: {sorted(there)}; must be: {sorted(must)}"
    end = run.ended()
    if end is not None and end["outcome"] == "completed":
        last = set(names(run.events("attempt_started")[-1]["nodes"]))
        broken: set[str] = set().union(*(nodes for nodes, leave in zip(guilty, leaves, strict=True) if leave))
        assert not last & broken, f"it continued with {sorted(last & broken)}"


def requeues(run: FaultRun) -> int:
    """How often its job was put back into the queue, by whomever."""
    record = run.cluster.run(["scontrol", "show", "job", run.job_id()]).stdout
    found = re.search(r"\bRestarts=(\d+)", record)
    assert found is not None, record
    return int(found[1])


def starts_as_often_as_it_must(run: FaultRun, attempts: int, of_the_job: int) -> None:
    """What is healthy is not started again: no more attempts and requeues than the two faults cost alone.

    A row with a short time limit counts on one requeue; on a slow machine its time is up more often.
    """
    roots = [(event.get("root") or {}).get("kind") for event in run.events("decision")]
    slow = max(0, roots.count("slurm_time_limit") - 1)
    refused = len(actions(run)) - len(actions(run, on_faults=True))
    started = [event["attempt"] for event in run.events("attempt_started")]
    assert len(started) <= attempts + refused + slow, f"attempts {started}; {attempts} are enough"
    assert requeues(run) <= of_the_job + slow, "the job was requeued, or was more often than it had to be"


def one_acts_at_a_time(run: FaultRun, killed: int, *, standby: bool) -> None:
    """A supervisor follows another only if that was killed or the job requeued; none fails by itself."""
    started = run.events("supervisor_started")
    assert len(started) <= 1 + requeues(run) + killed, f"supervisors: {started}"
    acted = run.events("deputy_acted")
    assert standby or not acted, acted
    logs = [path for path in run.written.glob("logs/job-*") if "Traceback" in path.read_text(errors="replace")]
    assert not logs, f"a supervisor failed: {logs}"

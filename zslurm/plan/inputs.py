"""The scenario of a run file: each input with its value and its origin.

What is neither given nor measured is assumed, and a plan shows it as such. The assumed values:

    stall      with `checkpoint.background`, the bytes that a rank owns, copied at 10 GB/s; else the whole write
    write      the bytes of a checkpoint at 1 GB/s for each node, 100 GB/s in all at most
    restart    90 s for ending the old ranks, starting Python and the communication on all of them, and the first
               step; and reading the checkpoint as fast as it is written
    regroup    5 s; 0.7 s were measured on four ranks of one machine (benchmarks/results/recovery.json)
    copy       the bytes that a rank owns at 5 GB/s: into host memory, and to the buddy
    detection  3 s for a dead node, `aegis.poll_s` and `aegis.settle_s` if a rank ends, the limit of
               `aegis.hang` for one that hangs, `aegis.standby_s` for a dead batch node
    wait       `aegis.expected_wait_s`; an hour, as Aegis takes it, if that is not set
    repair     a day
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zslurm.aegis.types import WorkLeft
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.config.spec import RunSpec
from zslurm.plan.failures import Kind
from zslurm.plan.measured import Measured
from zslurm.plan.simulate import Scenario
from zslurm.slurm.jobs import time_limit
from zslurm.train.plan.io import checkpoint_bytes
from zslurm.train.schedule import Plan

_GIGA = 1e9
_COPY_GB_S, _BUDDY_GB_S, _NODE_GB_S, _STORAGE_GB_S = 10.0, 5.0, 1.0, 100.0
_RESTART_S, _REGROUP_S, _DEAD_NODE_S, _WAIT_S, _REPAIR_S = 90.0, 5.0, 3.0, 3600.0, 86400.0


@dataclass(frozen=True)
class Given:
    """What a user gives, in seconds; None is not given."""

    step_s: float | None = None
    stall_s: float | None = None
    write_s: float | None = None
    restart_s: float | None = None
    regroup_s: float | None = None
    detect_s: float | None = None
    wait_s: float | None = None
    repair_s: float | None = None


class Input:
    """One input: its value, and its origin."""

    def __init__(self, name: str, value: float, origin: str, text: str = "") -> None:
        self.name, self.value, self.origin, self.text = name, value, origin, text


@dataclass
class Inputs:
    """All inputs of a scenario.

    Attributes:
        scenario: that they make.
        rows: the inputs, in the order in which they are shown.
    """

    scenario: Scenario
    rows: list[Input] = field(default_factory=list)


def inputs_of(
    spec: RunSpec, step_s: tuple[float, str], given: Given, measured: Measured | None, cluster_nodes: int | None
) -> Inputs:
    """Return the scenario of a run; `step_s` is the time of a step with its origin, if nothing else has it.

    A value that is given wins over one that was measured, and that over the run file and assumptions.
    """
    rows: list[Input] = []
    of_run = measured or Measured(None, None, None, None, 0, 0)

    def take(name: str, measured_s: float | None, otherwise: float, origin: str) -> float:
        asked: float | None = getattr(given, name)
        value, source = (
            (asked, "option")
            if asked is not None
            else (measured_s, "measured")
            if measured_s is not None
            else (otherwise, origin)
        )
        rows.append(Input(name, value, source))
        return value

    nodes, ranks = spec.slurm.nodes, spec.world_size
    size = checkpoint_bytes(spec)
    reading_s = size / (min(nodes * _NODE_GB_S, _STORAGE_GB_S) * _GIGA)
    aegis, background = spec.aegis, spec.checkpoint.background
    seconds = take("step_s", of_run.step_s, *step_s)
    copying_s = size / ranks / _GIGA
    stall = take("stall_s", of_run.stall_s, copying_s / _COPY_GB_S if background else reading_s, "assumed")
    write = take("write_s", of_run.write_s, reading_s if background else 0.0, "assumed")
    ended = aegis.poll_s + aegis.settle_s
    hang = max(aegis.hang.step_s, aegis.hang.step_factor * seconds)
    detect = take("detect_s", None if of_run.down_s is None else 0.0, ended, "run file")
    restart = take("restart_s", of_run.down_s, _RESTART_S + reading_s, "assumed")
    regroup = take("regroup_s", None, _REGROUP_S, "assumed") if spec.recovers_in_memory else None
    wait = take(
        "wait_s", None, aegis.expected_wait_s or _WAIT_S, "run file" if aegis.expected_wait_s else "assumed"
    )
    repair = take("repair_s", None, _REPAIR_S, "assumed") if cluster_nodes is not None else 0.0
    kinds: dict[Kind, float] = {
        "process": detect,
        "restart": detect,
        "node": max(detect, _DEAD_NODE_S) if given.detect_s is None else detect,
        "hang": hang,
    }
    limit = time_limit(spec.slurm.time) if spec.slurm.time else None
    scenario = Scenario(
        steps=Plan(spec.phases).total_steps,
        step_s=seconds,
        nodes=nodes,
        spares=spec.slurm.spares,
        every=spec.checkpoint.every_steps,
        stall_s=stall,
        write_s=write,
        detect_s=kinds,
        batch_lost_s=aegis.standby_s if given.detect_s is None else detect,
        restart_s=restart,
        regroup_s=regroup,
        copy_every=spec.recovery.every_steps,
        copy_s=copying_s / _BUDDY_GB_S,
        wait_s=wait,
        repair_s=repair,
        cluster_nodes=cluster_nodes,
        aegis=aegis,
        helpers=spec.may_ask_for_helpers,
        work=_work(spec),
        limit_s=limit.total_seconds() - spec.slurm.save_margin_s if limit else None,
        slowdown=_slowdown(spec),
    )
    rows.append(Input("checkpoint_bytes", size, "run file", show_bytes(size)))
    rows.append(Input("every_steps", scenario.every, "run file", counted(scenario.every, "step")))
    return Inputs(scenario, rows)


def _work(spec: RunSpec) -> WorkLeft:
    """Return the batch by which the policy weighs fewer nodes: of the phase with most tokens."""
    phase = max(spec.phases, key=lambda phase: phase.tokens)
    groups = max(1, spec.ranks_per_node // phase.context_parallel)
    return WorkLeft(phase.global_batch, phase.micro_batch, groups)


def _slowdown(spec: RunSpec) -> Callable[[int], float]:
    """Return how many times as long a step takes on n nodes: by the largest shares, as Aegis counts."""
    phase = max(spec.phases, key=lambda phase: phase.tokens)
    local = spec.ranks_per_node

    def most(nodes: int) -> int:
        ranks = max(1, nodes * local // phase.context_parallel)
        return -(-phase.global_batch // ranks)

    on_all = most(spec.slurm.nodes)
    return lambda nodes: most(nodes) / on_all

"""A simulated training with a simulated clock, whose agents report to a detector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.protocol import ProgressReport, RankProgress, Stamp
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection
from zslurm.train.progress import Phase

WALL = 1_700_000_000.0
SETTINGS = AegisSection.model_validate(
    {
        "heartbeat_timeout_s": 8,
        "hang": {"setup_s": 100, "step_s": 20, "step_factor": 5, "save_s": 60, "eval_s": 40},
        "straggler": {"factor": 1.3, "after_s": 100},
    }
)


@dataclass
class Training:
    """Ranks that train in step, two to a node, and the agents that report on them every second."""

    nodes: int = 2
    step_s: float = 2.0
    attempt: int = 1
    settings: AegisSection = SETTINGS
    now: float = 1000.0
    wall: float = WALL
    silent: set[int] = field(default_factory=set)
    """Nodes whose agents send nothing."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Ranks that do nothing any more, and since when; those that wait for them stop as well."""
    stuck: float | None = None
    """Since when the collective itself hangs: all have done their own part."""
    halted: set[int] = field(default_factory=set)
    """Ranks whose process is stopped."""
    gone: set[int] = field(default_factory=set)
    """Ranks whose process has ended, by the agent of their node."""
    phase: Phase = Phase.STEP
    own_s: dict[int, float] = field(default_factory=dict)
    """Seconds of own work per microbatch, where they differ from 1."""
    slow_steps: tuple[int, int] = (0, 10**9)
    """First and last of the steps in which they do."""
    missing: set[int] = field(default_factory=set)
    """Ranks without a record."""
    moved: dict[int, int] = field(default_factory=dict)
    """Ranks that were replaced by a process on another node."""
    adopted: bool = False
    known_step_times: tuple[float, ...] = ()
    detector: Detector = field(init=False)
    found: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.detector = Detector(self.settings)
        self.began = self.now
        self.detector.begin(
            self.attempt, self.rank_nodes, self.now, adopted=self.adopted, step_times=self.known_step_times
        )

    @property
    def rank_nodes(self) -> list[str]:
        return [f"node{rank // 2}" for rank in range(2 * self.nodes)]

    def record(self, rank: int) -> RankProgress:
        """What the rank wrote last."""
        halted = min([*self.stopped.values(), self.stuck or math.inf], default=math.inf)
        until = min(self.now, halted)
        step = int((until - self.began) / self.step_s)
        when = self.began + step * self.step_s
        waiting = False
        if self.now > halted:
            if self.stuck is not None:
                when, waiting = when + self.step_s * 0.9, True
            elif rank not in self.stopped:
                when, waiting = when + self.step_s * 0.7, True
        if self.phase is not Phase.STEP:
            when, waiting = min([self.now, *(t for r, t in self.stopped.items() if r == rank)]), False
        if self.phase is Phase.SETUP:
            step = -1
        age = max(0.0, self.now - when)
        first, last = self.slow_steps
        work = step + (self.own_s.get(rank, 1.0) - 1.0) * max(0, min(step, last) - first)
        return RankProgress(
            rank, 100 + rank, self.phase, step, -1, age, waiting, work, rank in self.halted, rank in self.gone
        )

    def stamp(self, node: int) -> Stamp:
        return Stamp(f"node{node}", int(self.now), self.wall, self.now)

    def second(
        self,
        *,
        look: bool = True,
        trouble: Mapping[str, str] | None = None,
        witness_reports: Mapping[str, WitnessReport] | None = None,
        **reported: Any,
    ) -> None:
        """One second passes; without a look, the supervisor is busy with something else."""
        self.now += 1.0
        self.wall += 1.0
        for node in range(self.nodes):
            if node not in self.silent:
                here = (rank for rank in range(2 * self.nodes) if self.moved.get(rank, rank // 2) == node)
                rows = tuple(self.record(rank) for rank in here if rank not in self.missing)
                self.detector.feed(ProgressReport(self.stamp(node), self.attempt, rows), self.now + 0.1)
        nodes = self.detector.nodes
        nodes.take_slurm_states(trouble or {}, (trouble or {}).keys())
        for name, report in (witness_reports or {}).items():
            nodes.take_witnesses(name, report)
        if look:
            self.found += self.detector.check(self.now + 0.2, self.wall, **reported)

    def move(self, rank: int, node: int) -> None:
        """Another process, on this node, is the rank from now on."""
        self.moved[rank] = node
        self.detector.move(rank, f"node{node}")
        self.detector.regroup(self.now)

    def run(self, seconds: int, **reported: Any) -> list[Fault]:
        """Time passes; returns the faults that were found meanwhile."""
        before = len(self.found)
        for _ in range(seconds):
            self.second(**reported)
        return self.found[before:]

    def kinds(self, faults: list[Fault]) -> list[tuple[str, str | None, int | None]]:
        return [(fault.kind, fault.node, fault.rank) for fault in faults]

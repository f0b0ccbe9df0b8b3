"""The types that Aegis works with: a fault that was noticed, the history of the run, and what to do.

Sensors, logs and srun yield faults; the history is read back from `events.jsonl`; the policy turns both into a
decision. Everything here is plain data that goes into an event and comes back from one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from zslurm.aegis.fault_kinds import FaultKind, FaultRule, rule_of
from zslurm.aegis.fault_kinds import Role as Role
from zslurm.aegis.fault_kinds import Scope as Scope
from zslurm.run.exclusions import Exclusion

Action = Literal["finish", "restart", "swap", "shrink", "requeue", "stop"]
"""What to do after an attempt: nothing more (it completed, or was asked to stop), start the ranks again on the
same nodes, with a spare in place of a node, with fewer nodes, in a requeued job, or stop for good."""


EndedAs = Literal["completed", "interrupted", "failed", "lost"]
"""How an attempt ended."""


OF_STEP = frozenset({"srun", "launcher"})
"""Sources that report how the step's ranks ended: srun, and the launcher of a local run."""


@dataclass(frozen=True)
class Fault:
    """One thing that was noticed.

    Attributes:
        kind: its kind (aegis/fault_kinds.py); one of another version may be in no table.
        role: its part in the failure.
        scope: what is broken if it is a root.
        time: UNIX seconds when it happened, or else was noticed.
        source: who noticed: `srun` (in a local run `launcher`), `rank`, `log`, `agent`, or the name of a sensor.
        line: what reports it, one line.
        node: the node, as Slurm calls it.
        gpu: local index or PCI address of the GPU.
        nic: name or PCI address of the NIC.
        rank: global rank.
        step: optimizer step after which it happened, if known.
        cleared: true if it is the end of an earlier fault (a link that came back).
        fingerprint: of the numbers of a numeric failure; the same one means the same numbers, bit for bit.
    """

    kind: FaultKind
    role: Role
    scope: Scope
    time: float
    source: str
    line: str
    node: str | None = None
    gpu: str | None = None
    nic: str | None = None
    rank: int | None = None
    step: int | None = None
    cleared: bool = False
    fingerprint: str | None = None

    @property
    def rule(self) -> FaultRule:
        """What its kind means, and what is done about it."""
        return rule_of(self.kind)

    @classmethod
    def of_kind(cls, kind: FaultKind, time: float, source: str, line: str, **more: Any) -> Fault:
        """Return a fault with the role and the scope of its kind, if `more` has no others."""
        rule = rule_of(kind)
        return cls(
            **{"role": rule.role, "scope": rule.scope} | more, kind=kind, time=time, source=source, line=line
        )

    def fields(self) -> dict[str, Any]:
        """As fields of an event; without what is not known."""
        body = {fault_field.name: getattr(self, fault_field.name) for fault_field in fields(self)}
        return {name: value for name, value in body.items() if value is not None and value is not False}

    @classmethod
    def of(cls, fields_of_event: Mapping[str, Any]) -> Fault:
        """Back from `fields`; further keys are ignored.

        Raises:
            TypeError: a field that every fault has is missing.
        """
        names = {fault_field.name for fault_field in fields(cls)}
        return cls(**{name: value for name, value in fields_of_event.items() if name in names})


@dataclass(frozen=True)
class Incident:
    """A failed attempt of the past, and what was done about it.

    Attributes:
        time: of the decision, UNIX seconds.
        attempt: its number.
        action: what was done.
        root: its root; None if none was found.
        committed_step: step of the newest checkpoint when it ended; -1 before the first.
        excluded: nodes that were excluded for it.
    """

    time: float
    attempt: int
    action: Action
    root: Fault | None
    committed_step: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """What the run went through, read from its events; oldest first."""

    incidents: tuple[Incident, ...] = ()
    exclusions: Mapping[str, Exclusion] = field(default_factory=dict)
    """Each node that was excluded, with its newest exclusion, expired ones among them."""
    starts: tuple[float, ...] = ()
    """When each attempt was started, UNIX seconds."""
    waits: tuple[float, ...] = ()
    """Seconds between each requeue and the start of the next attempt."""
    helper_waits: tuple[float, ...] = ()
    """Seconds that each helper job has waited that has started."""
    readmitted: frozenset[str] = frozenset()
    """Nodes that a person or the group has allowed again at some time."""


@dataclass(frozen=True)
class WorkLeft:
    """What is left to train, as far as it matters for the number of nodes.

    Attributes:
        batch: sequences of an optimizer step, in the phase that the newest checkpoint is in.
        micro_batch: sequences of a microbatch of it.
        ranks_per_node: data-parallel ranks of a node in it: context groups, if ranks share sequences.
        job_s: seconds until the job's time limit; None if it has none, or it is not known.
        training_s: seconds of the steps that are left, as fast as the last ones were; None before the first.
    """

    batch: int
    micro_batch: int
    ranks_per_node: int
    job_s: float | None = None
    training_s: float | None = None


@dataclass(frozen=True)
class Resources:
    """What there is to continue with.

    Attributes:
        nodes: nodes of the job that are alive and not excluded, in the order of ranks; spares among them.
        in_use: those, and dead ones, on which the attempt ran.
        needed: nodes that the run is meant to have.
        outlives_nodes: the job continues when one of its nodes dies (`--no-kill`), so a new step may start at
            once.
        can_requeue: it can be put back into the queue, from inside or by a successor.
        elsewhere: usable nodes of its partition, the job's among them, without dead nodes and without those
            that were excluded before; None if Slurm does not report it.
        demanded: nodes that the run insists on (`slurm.nodelist`).
        asked: nodes that the job asks Slurm for, spares among them; None: `needed`.
        work: what is left to train; None if it is unknown, or does not matter: the run may not shrink.
        helper_wait_s: what a helper job for the missing nodes is expected to wait; None if there can be none.
        slices: node -> the slice of a leaf switch that it is on, for each rail; None if they are not known.
    """

    nodes: tuple[str, ...]
    in_use: tuple[str, ...]
    needed: int
    outlives_nodes: bool = False
    can_requeue: bool = True
    elsewhere: int | None = None
    demanded: frozenset[str] = frozenset()
    asked: int | None = None
    work: WorkLeft | None = None
    helper_wait_s: float | None = None
    slices: Mapping[str, tuple[str, ...]] | None = None

    def fields(self) -> dict[str, Any]:
        """As a field of an event."""
        return {**asdict(self), "demanded": sorted(self.demanded)}


@dataclass(frozen=True)
class AttemptSummary:
    """An attempt that is over, or that may have to be ended.

    Attributes:
        now: UNIX seconds.
        attempt: its number.
        outcome: how its step ended; None while it runs.
        faults: what was noticed since it started, by time.
        committed_step: step of the newest checkpoint now; -1 before the first.
        asked_to_stop: the signal that asked the run to stop (`SIGUSR2`, `SIGUSR1`: time limit), if any.
        requeued: Slurm itself has put the job back into the queue.
        preempted: Slurm preempts the job, and requeues or cancels it, now or at the end of the grace time.
        progressed_at: UNIX seconds when the slowest rank last finished a step; a rank that is gone counts with its
            last one; None if that is not known. What logs and sensors reported before it was overcome, unless
            it is a state that lasts.
        nodes: on which it runs or ran.
    """

    now: float
    attempt: int
    outcome: EndedAs | None
    faults: tuple[Fault, ...]
    committed_step: int = -1
    asked_to_stop: str | None = None
    requeued: bool = False
    progressed_at: float | None = None
    nodes: tuple[str, ...] = ()
    preempted: Literal["requeue", "cancel"] | None = None

    def fields(self) -> dict[str, Any]:
        """As a field of an event; without the faults, which are separate events, and what is not known."""
        body = {name: value for name, value in asdict(self).items() if name != "faults"}
        return {name: value for name, value in body.items() if value not in (None, False, ())}


@dataclass(frozen=True)
class Alarm:
    """What to do about faults while the attempt still runs.

    Attributes:
        give_up: end the attempt now; otherwise the faults are recorded, no more.
        root: the fault for which.
        reason: one line.
        exclude: nodes that will be excluded for it.
    """

    give_up: bool
    root: Fault | None = None
    reason: str = ""
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do after an attempt.

    Attributes:
        action: the cheapest that will do.
        reason: one line that a person understands.
        root: the root of the attempt.
        exclude: nodes to exclude from now on; empty for a user's own bug.
        nodes: nodes to start on, if `action` is restart, swap or shrink.
        n_nodes: nodes to ask for, if `action` is requeue; None: as many as before.
        test_gpu: (node, GPU or rank) to be tested first, because NaN came from it again and again.
            If it fails, decide again with a fault `gpu_test_failed` more; if it passes, do as decided here.
        wait_s: seconds to wait before the next start; None: none.
        step_time_ratio: a step's time on fewer nodes, as a multiple of that on those that a requeue would get;
            None if these were not weighed.
        expected_wait_s: seconds of the wait for a requeue's nodes, if these were weighed.
    """

    action: Action
    reason: str
    root: Fault | None = None
    exclude: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    n_nodes: int | None = None
    test_gpu: tuple[str, str] | None = None
    wait_s: float | None = None
    step_time_ratio: float | None = None
    expected_wait_s: float | None = None

    def fields(self) -> dict[str, Any]:
        """As fields of an event."""
        body = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        if self.root is not None:
            body["root"] = self.root.fields()
        return body

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Decision | None:
        """Back from a row `decision`; None if it is not complete."""
        names = {decision_field.name for decision_field in fields(cls)}
        body: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row.items()
            if name in names
        }
        try:
            root = body.get("root")
            return cls(**{**body, "root": Fault.of(root) if root else None})
        except TypeError:
            return None

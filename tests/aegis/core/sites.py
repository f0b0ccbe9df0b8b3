"""An attempt with recovery in memory that a test tells what happens, and what the core asks for meanwhile."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

from zslurm.aegis.core.attempt import AttemptState, MemoryState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.nodes import NodeTable
from zslurm.aegis.core.messages import (
    CheckSpare,
    CoreAction,
    CoreEvent,
    Exclude,
    FewerWeighed,
    ForgetReplaced,
    HoldForMove,
    Record,
    Regroup,
    SparesChecked,
    StartWarm,
    StoreGone,
    StoreReported,
    Tick,
    WarmEnded,
    WeighFewer,
)
from zslurm.aegis.core.policy.shrinking import Weighed
from zslurm.aegis.core.step import step
from zslurm.aegis.fault_kinds import NODE_DEAD, RANK_KILLED, FaultKind
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.recovery.generation import Generation, node_of

PER_NODE = 2
NODES = ("n0", "n1", "n2")


def _nothing(*_: object, **__: object) -> None:
    """Take the place of a detector's method."""


class Site:
    """Three nodes of two ranks and a spare; warm processes wait."""

    def __init__(self, *, step: int = 0, **aegis: Any) -> None:
        """Begin after a step; -1: before the first, and without warm processes."""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.generations: list[Generation] = []
        self.held: list[Generation] = []
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.checked: list[set[str]] = []
        self.actions: list[CoreAction] = []
        self.replaced: tuple[set[int], set[str]] = (set(), set())
        self.store_alive, self.checks_end = True, True
        self.unfit: dict[str, str] = {}
        self.fewer: dict[int, str] = {}
        self.weighed: dict[int, Weighed] = {}
        self.now = 1000.0
        settings = AegisSection.model_validate({"recovery": "memory", "recovery_s": 10} | aegis)
        ranks = [node for node in NODES for _ in range(PER_NODE)]
        self.detector = SimpleNamespace(
            step=step, move=_nothing, begin=_nothing, regroup=_nothing, excuse=_nothing, nodes=NodeTable(settings)
        )
        self.state = AttemptState(
            settings, 1, NODES, ranks, cast(Detector, self.detector), has_agents=False,
            memory=MemoryState.of_start(ranks, PER_NODE, ("n3",)),
        )  # fmt: skip
        self.tick(step)
        names = ("n0/w1", "n1/w2", "n2/w3", "n3/w4", "n3/w5") if step >= 0 else ()
        self.reports(*({"event": "warm", "member": name} for name in names), step=step)

    @property
    def memory(self) -> MemoryState:
        assert self.state.memory is not None
        return self.state.memory

    def tell(self, event: CoreEvent) -> None:
        events = deque([event])
        while events:
            _, actions = step(self.state, events.popleft())
            for action in actions:
                self.actions.append(action)
                events.extend(self.carry_out(action))

    def carry_out(self, action: CoreAction) -> list[CoreEvent]:
        match action:
            case Record():
                self.events.append((action.event.NAME, action.event.fields()))
            case Exclude():
                self.events.append(("nodes_excluded", {"nodes": action.nodes, "reason": action.reason}))
            case StartWarm():
                self.asked.append((action.nodes, action.per_node))
            case CheckSpare():
                self.checked.append(set(action.nodes))
                reasons = {node: self.unfit.get(node, "") for node in action.nodes}
                return [SparesChecked(reasons, action.round)] if self.checks_end else []
            case WeighFewer():
                reason = self.fewer.get(action.nodes, "aegis.min_nodes is not set")
                return [FewerWeighed(action.nodes, reason, self.weighed.get(action.nodes))]
            case Regroup():
                self.generations.append(action.generation)
                return [] if self.store_alive else [StoreGone(move=False)]
            case HoldForMove():
                self.held.append(action.generation)
                return [] if self.store_alive else [StoreGone(move=True)]
            case ForgetReplaced():
                self.replaced = set(action.members), set(action.dead)
        return []

    def tick(self, step: int = 5, *, times: int = 3, broken: str = "") -> None:
        """Let time pass: what the core asks for is answered between two ticks."""
        self.detector.step = step
        for _ in range(times):
            self.now += 0.01
            self.tell(Tick(self.now, self.now, broken=broken))

    def reports(self, *events: dict[str, Any], step: int = 5) -> None:
        for event in events:
            self.tell(StoreReported(event, self.now, self.now))
        self.tick(step)

    def lose(self, *ranks: int, dead: tuple[str, ...] = (), kind: FaultKind = RANK_KILLED, step: int = 5) -> bool:
        """Lose ranks, by themselves or with their nodes; return whether the others regroup."""
        died = [Fault.of_kind(NODE_DEAD, 1.0, "agent", "it died", node=node) for node in dead]
        happened = [] if dead else [Fault.of_kind(kind, 1.0, "srun", "it happened")]
        self.state.lost, self.state.faults = set(ranks), died + happened
        self.tick(step)
        return self.memory.active

    def end_warm(self, member: str) -> None:
        """Let a process of a warm step be killed."""
        self.tell(WarmEnded(member, TaskFailure(node_of(member), (0,), "Killed"), {}, self.now))

    def recover(self, number: int, step: int = 6) -> None:
        self.reports({"event": "recovered", "number": number, "step": step, "rolled_back": 1}, step=step)

    def check_spares(self, **unfit: str) -> None:
        """Check spares from now on, of which some are `unfit`."""
        self.memory.checks_spares, self.unfit = True, unfit

    def be_late(self) -> None:
        """Let the limit of the recovery that is under way pass."""
        assert self.memory.regrouping is not None
        self.now = self.memory.regrouping.deadline
        self.tick()

    def recorded(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]

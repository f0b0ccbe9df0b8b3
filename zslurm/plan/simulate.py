"""Simulate a run from its start to its last step, fault by fault.

It is a discrete-event simulation: between two events (a fault, the time limit, the end) the steps and saves that
were made follow from the time by division, so a run costs as many operations as it has faults, on any number of
GPUs.
What happens at a fault is decided by Aegis's own policy (decisions.py); here is what it costs:

    detection         by the kind of the fault
    recovery          in memory, if the run has it: regroup, and go back to the newest copy that is whole; on a
                      spare, or on fewer nodes (`aegis.heal`)
    a helper job      is asked for then, if the run may have one: after a wait its ranks join, and lose no step
    or a restart      the ranks start again, and load the newest checkpoint that was committed
    the queue         gives the run all its nodes and spares again, after a wait
    the batch node    if it is lost, the job is requeued whatever else it has
    the time limit    a save that is waited for, and the queue

Nodes of the job fail while they train and while ranks start; a fault during a restart begins another one. A save
is committed `write_s` after training continues, and what a fault interrupts is lost. A save that is due while the
last one is written waits for it: the interval is then longer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from zslurm.aegis.core.policy.shrinking import HELPER_STARTS_S, Weighed, weigh, why_not_fewer
from zslurm.aegis.fault_kinds import rule_of
from zslurm.aegis.types import Decision, WorkLeft
from zslurm.config.aegis import AegisSection
from zslurm.plan.decisions import KIND_OF, Decider
from zslurm.plan.failures import Faults, Kind, SampledFault

_ABANDONED_AFTER = 50.0
"""Times as long as without faults, after which a simulated run is given up."""


@dataclass(frozen=True)
class Scenario:
    """A run on its cluster. Times are in seconds.

    Attributes:
        steps: of the whole run.
        step_s: of a step on all nodes.
        nodes: that train.
        spares: nodes of the job on top.
        every: steps between two saves.
        stall_s: that training stands still for a save.
        write_s: from then until the checkpoint is committed.
        detect_s: from a fault until Aegis acts, by kind.
        batch_lost_s: from the loss of the batch node until the job is requeued.
        restart_s: from there until the ranks train again, from a checkpoint.
        regroup_s: the same for recovery in memory; None: the run restarts its ranks.
        copy_every: steps between two copies for recovery in memory.
        copy_s: from the end of a step until its copy is whole.
        wait_s: that a requeued job waits for its nodes, and a helper job for those that are missing.
        repair_s: that a lost node is away, on average (exponential); matters with `cluster_nodes` only.
        cluster_nodes: nodes that this run can get; None: there are always others.
        aegis: the settings of the policy.
        helpers: the run may ask for helper jobs.
        work: by which the policy weighs fewer nodes against the queue; None: fewer nodes are always better.
        limit_s: from the start of a job until it saves for its time limit; None: there is none.
        slowdown: a step's time on n nodes as a multiple of that on all; by default nodes / n.
        horizon_s: of the simulation; None: to the end of the run.
    """

    steps: int
    step_s: float
    nodes: int
    spares: int = 0
    every: int = 500
    stall_s: float = 0.0
    write_s: float = 0.0
    detect_s: Mapping[Kind, float] = field(default_factory=dict)
    batch_lost_s: float = 0.0
    restart_s: float = 0.0
    regroup_s: float | None = None
    copy_every: int = 1
    copy_s: float = 0.0
    wait_s: float = 0.0
    repair_s: float = 0.0
    cluster_nodes: int | None = None
    aegis: AegisSection = field(default_factory=AegisSection)
    helpers: bool = False
    work: WorkLeft | None = None
    limit_s: float | None = None
    slowdown: Callable[[int], float] | None = None
    horizon_s: float | None = None

    @property
    def ideal_s(self) -> float:
        """Return the seconds of the steps, without anything else."""
        return self.steps * self.step_s

    @property
    def period(self) -> int:
        """Return the steps between two saves, as the time of writing allows them."""
        return max(self.every, math.ceil(self.write_s / self.step_s - 1e-9))

    def step_time(self, nodes: int) -> float:
        """Return the seconds of a step on a number of nodes."""
        if nodes == self.nodes:
            return self.step_s
        return self.step_s * (self.slowdown(nodes) if self.slowdown else self.nodes / nodes)


PARTS = (
    "kept steps",
    "saving",
    "lost steps",
    "detection",
    "recovery in memory",
    "restart",
    "queue",
    "fewer nodes",
)
"""What the time of a run consists of."""


@dataclass
class SimulatedOutcome:
    """What a simulated run took.

    Attributes:
        wall_s: from its first start to its end, waits included.
        parts_s: the same by what it was spent on; `kept steps` is what it would have taken without anything else.
        node_s: seconds of nodes that were allocated to it, spares included.
        faults: by kind.
        actions: how often each was taken: memory, restart, swap, shrink, helper, requeue, time limit.
        steps: that were made and kept.
        finished: it came to its end.
        stopped: why Aegis stopped it; empty if it did not.
    """

    wall_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    node_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    finished: bool = False
    stopped: str = ""

    @property
    def goodput(self) -> float:
        """Return the share of the time that became steps that were kept."""
        return self.parts_s["kept steps"] / self.wall_s if self.wall_s else 1.0


class _GivenUp(Exception):
    """The run does not come to its end, is stopped, or the horizon is reached."""


def simulate(scenario: Scenario, faults: Faults, known: dict[object, Decision] | None = None) -> SimulatedOutcome:
    """Return what a run takes that meets these faults; `known` are decisions of other runs of the scenario."""
    return _Simulation(scenario, faults, known).run()


@dataclass
class _HelperJob:
    """A helper job of which no rank trains.

    Attributes:
        joins_at: when its ranks can join.
        nodes: that it has, or is to get.
        is_new: it is asked for, and has not had ranks yet.
    """

    joins_at: float
    nodes: int
    is_new: bool = True


class _Simulation:
    def __init__(self, scenario: Scenario, faults: Faults, known: dict[object, Decision] | None) -> None:
        self.scenario, self.faults, self.out = scenario, faults, SimulatedOutcome()
        self.step = self.committed = 0
        self.copied: int | None = None  # step of the newest copy that is whole on every rank
        self.in_use, self.spares, self.allocated = scenario.nodes, scenario.spares, 0
        self.of_helpers = 0  # nodes in use that helper jobs have brought
        self.helpers: list[_HelperJob] = []
        self.job_began = 0.0
        self.repairs: list[tuple[float, int]] = []  # when a lost node is back
        self._order = count()
        settings = scenario.aegis.model_copy(update={"expected_wait_s": scenario.wait_s})
        self.aegis = Decider(settings, scenario.nodes, scenario.nodes + scenario.spares, known)
        horizon = scenario.horizon_s
        self.horizon = _ABANDONED_AFTER * (scenario.ideal_s + 1) if horizon is None else horizon

    def run(self) -> SimulatedOutcome:
        self.allocated = self.scenario.nodes + self.scenario.spares
        try:
            self.aegis.started(0.0)
            self._recover_from(self._pass(self.scenario.restart_s, "restart"))
            while (event := self._train()) != "done":
                if event == "limit":
                    self._save_for_limit()
                elif event == "join":
                    self._let_helper_join()
                else:
                    self._recover_from(self.faults.pop())
            self.out.finished = True
        except _GivenUp:
            pass
        self.out.steps = self.step
        return self.out

    def _count(self, name: str) -> None:
        self.out.actions[name] = self.out.actions.get(name, 0) + 1

    def _spend(self, seconds: float, part: str) -> None:
        """Let time pass; at the horizon the simulation ends."""
        remaining_s = self.horizon - self.out.wall_s
        spent = min(seconds, remaining_s)
        self.out.wall_s += spent
        self.out.parts_s[part] += spent
        self.out.node_s += spent * self.allocated
        if seconds >= remaining_s:
            raise _GivenUp

    def _pass(self, seconds: float, part: str) -> SampledFault | None:
        """Let time pass in which nodes may fail; return the fault that cut it short."""
        until = self.faults.next_in(self.out.wall_s, self.in_use)
        if until < seconds:
            self._spend(until, part)
            return self.faults.pop()
        self._spend(seconds, part)
        self.faults.expose(seconds, self.in_use)
        return None

    def _train(self) -> str:
        """Train to the next event, and return which: a fault, limit, join or done."""
        s, now = self.scenario, self.out.wall_s
        self._ask_for_helper()
        step_s, period = s.step_time(self.in_use), s.period
        first = min((self.step // period + 1) * period, s.steps) - self.step  # steps to the first save
        steps_left = s.steps - self.step
        saves = 1 + (steps_left - 1 - first) // period if steps_left > first else 0  # before the last one
        comes = {
            "done": steps_left * step_s + (saves + 1) * s.stall_s + s.write_s,
            "fault": self.faults.next_in(now, self.in_use),
            "limit": math.inf if s.limit_s is None else max(0.0, self.job_began + s.limit_s - now),
            "join": min((helper.joins_at - now for helper in self.helpers), default=math.inf),
        }
        comes["join"] = self._to_boundary(max(0.0, comes["join"]), first, step_s, steps_left)
        event = min(comes, key=lambda name: comes[name])  # of several at once the first
        cut = self.horizon - now
        event = "horizon" if cut <= comes[event] else event
        spent = min(cut, *comes.values())

        to_first, cycle = first * step_s + s.stall_s, period * step_s + s.stall_s
        made, stalled = self._made(spent, first, step_s, steps_left)
        written = spent - s.write_s
        if written >= to_first:
            passed = first + int((written - to_first) / cycle) * period
            self.committed = self.step + min(passed, steps_left)
        if s.regroup_s is not None:
            steps_copied, _ = self._made(max(0.0, spent - s.copy_s), first, step_s, steps_left)
            newest = max(self.step, (self.step + steps_copied) // s.copy_every * s.copy_every)
            self.copied = newest if spent >= s.copy_s else None
        began, self.step = self.step, self.step + made
        if event == "done":
            stalled = (saves + 1) * s.stall_s + s.write_s
        self._account(spent, began, step_s, stalled)
        self.faults.expose(spent, self.in_use)
        if event == "horizon":
            raise _GivenUp
        return event

    def _made(self, spent: float, first: int, step_s: float, left: int) -> tuple[int, float]:
        """Return the steps that are done after a time, and the seconds of it that were stalls."""
        s = self.scenario
        to_first, cycle = first * step_s + s.stall_s, s.period * step_s + s.stall_s
        if spent < to_first:
            made = min(first, int(spent / step_s + 1e-9))
            return made, max(0.0, spent - first * step_s)
        saves = int((spent - to_first) / cycle)
        remaining_s = spent - to_first - saves * cycle
        made = first + saves * s.period + min(s.period, int(remaining_s / step_s + 1e-9))
        return min(made, left), (1 + saves) * s.stall_s + max(0.0, remaining_s - s.period * step_s)

    def _to_boundary(self, spent: float, first: int, step_s: float, left: int) -> float:
        """Return the time until the step is finished in which the ranks are after so many seconds."""
        if math.isinf(spent):
            return spent
        made, stalled = self._made(spent, first, step_s, left)
        begun_s = spent - made * step_s - stalled
        return spent + step_s - begun_s if begun_s > 1e-9 * step_s else spent

    def _account(self, spent: float, began: int, step_s: float, stalled: float) -> None:
        """Book time of training; steps that are lost later are moved by `_go_back`."""
        out, made = self.out, self.step - began
        out.wall_s += spent
        out.node_s += spent * self.allocated
        out.parts_s["kept steps"] += made * self.scenario.step_s
        out.parts_s["fewer nodes"] += made * (step_s - self.scenario.step_s)
        out.parts_s["saving"] += stalled
        out.parts_s["lost steps"] += spent - made * step_s - stalled

    def _go_back(self, to: int) -> None:
        lost = (self.step - to) * self.scenario.step_s
        self.out.parts_s["kept steps"] -= lost
        self.out.parts_s["lost steps"] += lost
        self.step = to

    def _recover_from(self, fault: SampledFault | None) -> None:
        """Handle a fault, and those that come while it is handled, until the ranks train again."""
        memory = self.copied is not None
        while fault is not None:
            self.out.faults[fault.kind] = self.out.faults.get(fault.kind, 0) + 1
            if fault.kind == "node":
                back = self.out.wall_s - self.scenario.repair_s * math.log1p(-fault.draw)
                heapq.heappush(self.repairs, (back, next(self._order)))
                if fault.position * self.in_use < 1:
                    memory, fault = False, self._lose_batch_node()
                    continue
            following = self._pass(self.scenario.detect_s.get(fault.kind, 0.0), "detection")
            memory = memory and self._recovers_in_memory(fault)
            self._act(fault, memory=memory)
            if following is None:
                following = self._start(memory)
            fault = following

    def _lose_batch_node(self) -> SampledFault | None:
        """Requeue the job, which its batch node ends; return a fault that comes before its ranks train."""
        self._spend(self.scenario.batch_lost_s, "detection")
        self._count("requeue")
        self._requeue()
        return self._start(memory=False)

    def _recovers_in_memory(self, fault: SampledFault) -> bool:
        """Return whether the other ranks may continue; of ranks that hang those that do are killed first."""
        if fault.kind != "hang" and rule_of(KIND_OF[fault.kind]).in_memory != "rank":
            return False
        if fault.kind != "node" or self.spares:
            return True
        fewer = self.in_use - 1
        return not why_not_fewer(fewer, self.aegis.settings, lambda: None, lambda: self._weighed(fewer)).reason

    def _weighed(self, nodes: int) -> Weighed | None:
        """Return a number of nodes against a helper job and a requeue; None if they are not weighed."""
        work, s = self._work(), self.scenario
        return None if work is None else weigh(work, nodes, s.nodes, self.in_use, s.wait_s, self._helper_wait_s)

    @property
    def _helper_wait_s(self) -> float | None:
        return self.scenario.wait_s if self.scenario.helpers else None

    def _ask_for_helper(self) -> None:
        """Ask for a helper job if nodes are missing, and none waits; if costs are weighed, only if it pays."""
        s = self.scenario
        if s.regroup_s is None or not s.helpers or any(helper.is_new for helper in self.helpers):
            return
        missing = s.nodes - self.in_use - sum(helper.nodes for helper in self.helpers)
        if missing < 1:
            return
        if s.aegis.heal == "auto":
            weighed = self._weighed(self.in_use)
            if weighed is None or not weighed.helper_pays:
                return
        self.helpers.append(_HelperJob(self.out.wall_s + s.wait_s + HELPER_STARTS_S, missing))

    def _let_helper_join(self) -> None:
        """Have the ranks of a helper job join; one for which there are too few nodes waits for a repair."""
        s, now = self.scenario, self.out.wall_s
        helper = min(self.helpers, key=lambda helper: helper.joins_at)
        if helper.is_new and self._free() < helper.nodes:
            helper.joins_at = max(now, self.repairs[0][0]) + HELPER_STARTS_S
            return
        self.helpers.remove(helper)
        if helper.is_new:
            self.allocated += helper.nodes
            self.out.node_s += helper.nodes * HELPER_STARTS_S
        self.in_use += helper.nodes
        self.of_helpers += helper.nodes
        self._count("helper")
        assert s.regroup_s is not None
        self._recover_from(self._pass(s.regroup_s, "recovery in memory"))

    def _start(self, memory: bool) -> SampledFault | None:
        """Go back to the newest copy or checkpoint, and start the ranks; return a fault that comes before that."""
        if memory:
            assert self.scenario.regroup_s is not None and self.copied is not None
            self._go_back(self.copied)
            self._count("memory")
            return self._pass(self.scenario.regroup_s, "recovery in memory")
        self._go_back(self.committed)
        self.copied = None
        self._count("restart")
        self.aegis.started(self.out.wall_s)
        return self._pass(self.scenario.restart_s, "restart")

    def _act(self, fault: SampledFault, *, memory: bool) -> None:
        """Take a lost node out of the run, and do what Aegis decides if the ranks do not recover in memory."""
        s = self.scenario
        is_lost_helper = fault.kind == "node" and fault.position * self.in_use >= self.in_use - self.of_helpers
        if memory and fault.kind == "node":
            self._count("swap" if self.spares else "shrink")
            if self.spares:
                self.spares -= 1
            else:
                self.in_use -= 1
                self._lose_helpers(is_lost_helper)
        if memory:
            return
        decision = self.aegis.after(
            fault,
            self.out.wall_s,
            self.committed,
            self.in_use,
            self.spares,
            of_helpers=self.of_helpers,
            elsewhere=None if s.cluster_nodes is None else s.cluster_nodes - len(self.repairs),
            work=self._work(),
            helper_wait_s=self._helper_wait_s,
        )
        self._lose_helpers(is_lost_helper)
        self._carry_out(decision)

    def _lose_helpers(self, nodes: int) -> None:
        """Note that nodes of helper jobs are lost, whose jobs end."""
        self.of_helpers -= nodes
        self.allocated -= nodes

    def _carry_out(self, decision: Decision) -> None:
        if (mode := self.scenario.aegis.mode) != "act":
            self.out.stopped = f"aegis.mode is {mode}, with which a run ends at its first failure"
            raise _GivenUp
        match decision.action:
            case "swap":
                self.spares -= 1
                self._count("swap")
            case "shrink":
                self.in_use = len(decision.nodes)
                self._count("shrink")
                if self.of_helpers:  # they get ranks again once those of the job train
                    due = self.out.wall_s + self.scenario.restart_s + HELPER_STARTS_S
                    self.helpers.append(_HelperJob(due, self.of_helpers, is_new=False))
                    self.of_helpers = 0
            case "requeue":
                self._count("requeue")
                self._requeue()
            case "stop" | "finish":
                self.out.stopped = decision.reason
                raise _GivenUp
        self._spend(decision.wait_s or 0.0, "restart")

    def _work(self) -> WorkLeft | None:
        """Return what is left to train, as the supervisor knows it; None if nothing is weighed."""
        s = self.scenario
        if s.work is None or s.aegis.heal != "auto":
            return None
        job_left_s = None if s.limit_s is None else max(0.0, self.job_began + s.limit_s - self.out.wall_s)
        return replace(s.work, job_s=job_left_s, training_s=(s.steps - self.step) * s.step_time(self.in_use))

    def _requeue(self) -> None:
        """Wait in the queue for as many nodes as there are, and for as many as the run needs."""
        s, self.allocated, self.of_helpers, self.helpers = self.scenario, 0, 0, []
        self._spend(s.wait_s, "queue")
        fewest = min(s.aegis.fewest_nodes or s.nodes, s.nodes)
        while (healthy := self._healthy()) < fewest:
            self._spend(max(0.0, self.repairs[0][0] - self.out.wall_s), "queue")
        self.in_use = min(s.nodes, healthy)
        self.spares = min(s.spares, healthy - self.in_use)
        self.allocated = self.in_use + self.spares
        self.job_began = self.out.wall_s

    def _healthy(self) -> int:
        """Return the nodes that the run can get now."""
        self._take_repairs()
        wanted, nodes = self.scenario.nodes + self.scenario.spares, self.scenario.cluster_nodes
        return wanted if nodes is None else min(wanted, nodes - len(self.repairs))

    def _free(self) -> float:
        """Return the nodes that a helper job can get now."""
        self._take_repairs()
        nodes = self.scenario.cluster_nodes
        return math.inf if nodes is None else nodes - len(self.repairs) - self.in_use - self.spares

    def _take_repairs(self) -> None:
        while self.repairs and self.repairs[0][0] <= self.out.wall_s:
            heapq.heappop(self.repairs)

    def _save_for_limit(self) -> None:
        """Save, wait until it is committed, and continue in the next job."""
        self._count("time limit")
        self._spend(self.scenario.stall_s + self.scenario.write_s, "saving")
        self.committed = self.step
        self._carry_out(self.aegis.at_time_limit(self.out.wall_s, self.committed))
        self._recover_from(self._start(memory=False))

"""What Aegis does about the faults of a simulated run: its own policy (aegis/core), told what it would know.

The simulation counts nodes, and the policy takes names: the lost node and the spares have one, the others only if
the policy may continue on fewer nodes, so that their number matters.
"""

from __future__ import annotations

from zslurm.aegis.core.policy.policy import decide, most_excluded
from zslurm.aegis.fault_kinds import NIC_FAULT, NODE_DEAD, RANK_HANG, RANK_KILLED, FaultKind
from zslurm.aegis.types import AttemptSummary, Decision, EndedAs, Fault, History, Incident, Resources, WorkLeft
from zslurm.config.aegis import AegisSection
from zslurm.plan.failures import Kind
from zslurm.plan.failures import SampledFault as DrawnFault
from zslurm.run.exclusions import Exclusion

KIND_OF: dict[Kind, FaultKind] = {
    "node": NODE_DEAD,
    "process": RANK_KILLED,
    "restart": NIC_FAULT,  # of no node in particular
    "hang": RANK_HANG,
}
_HOUR_S = 3600.0
_KEPT = 100
"""Incidents and starts that are kept at most, which is above every limit that stops a run in practice."""


class Decider:
    """Decides after each fault, and keeps what the next decision depends on.

    Attributes:
        settings: the section `aegis`, with its limits for `needed` nodes.
        needed: nodes that train.
        asked: nodes of the job, its spares among them.
        known: decisions by all that they depend on, but for names and times; runs of one scenario share them.
    """

    def __init__(
        self, settings: AegisSection, needed: int, asked: int, known: dict[object, Decision] | None = None
    ) -> None:
        limit = most_excluded(settings, needed)
        self.settings = settings.model_copy(update={"max_excluded": limit})
        self.needed, self.asked = needed, asked
        self.known = {} if known is None else known
        self._incidents: list[Incident] = []
        self._starts: list[float] = []
        self._exclusions: dict[str, Exclusion] = {}
        self._replaced: dict[int, int] = {}

    def started(self, now: float) -> None:
        """Note that the ranks are started."""
        self._starts.append(now)

    def after(
        self, fault: DrawnFault, now: float, committed: int, in_use: int, spares: int, *,
        of_helpers: int = 0, elsewhere: int | None = None, work: WorkLeft | None = None,
        helper_wait_s: float | None = None,
    ) -> Decision:  # fmt: skip
        """Return what follows a fault; names in the decision are taken from a like one.

        Args:
            fault: that happened.
            now: seconds since the run began.
            committed: step of the newest checkpoint.
            in_use: nodes that the ranks were on.
            spares: of the job.
            of_helpers: nodes in use of helper jobs, the last ones: ranks that start again do not start there.
            elsewhere: nodes that can be had, without the lost one; None: as many as the run wants.
            work: what is left to train, if fewer nodes are weighed.
            helper_wait_s: what a helper job waits; None if there can be none.
        """
        self._forget(now, committed)
        index, kind = int(fault.position * in_use), KIND_OF[fault.kind]
        name = None if fault.kind == "restart" else f"n{index}.{self._replaced.get(index, 0)}"
        root = Fault.of_kind(kind, now, "srun" if kind == RANK_KILLED else "agent", "simulated", node=name)
        is_counted = self.settings.may_shrink and not spares
        before = tuple(
            (
                None if incident.root is None else (incident.root.kind, incident.root.node == name),
                incident.committed_step >= committed,
                bool(incident.excluded),
            )
            for incident in self._incidents
        )
        starts = min(len(self._starts), self.settings.restarts_per_hour)
        may_exclude = len(self._exclusions) < (self.settings.max_excluded or 0)
        key: tuple[object, ...] = (kind, spares, elsewhere, before, starts, may_exclude)
        if is_counted:
            key = (*key, in_use, of_helpers, index >= in_use - of_helpers, work)
        if (decision := self.known.get(key)) is None:
            of_job = in_use - of_helpers
            names = [f"other{number}" for number in range(in_use) if number != index] if is_counted else []
            at_helpers = of_job - (index < of_job)  # of the others, those of helper jobs begin here
            unnamed = in_use - 1 - len(names)
            lost = name or "n"
            alive = names[:at_helpers]
            if fault.kind != "node" and index < of_job:
                alive = [lost, *alive]
            resources = Resources(
                (*alive, *(f"spare{number}" for number in range(spares))),
                (lost, *names),
                self.needed - unnamed,
                outlives_nodes=True,
                elsewhere=None if elsewhere is None else elsewhere - unnamed,
                asked=self.asked - unnamed,
                work=work,
                helper_wait_s=helper_wait_s,
            )
            decision = self.known[key] = self._decide(resources, now, committed, (root,))
        exclude = (name,) if decision.exclude and name is not None else ()
        if name is not None and exclude:
            expires = now + self.settings.exclude_for_s
            self._exclusions[name] = Exclusion(exclude, decision.reason, now, expires)
        if decision.action in ("swap", "shrink", "requeue"):
            self._replaced[index] = self._replaced.get(index, 0) + 1
        self._incidents.append(Incident(now, 1, decision.action, root, committed, exclude))
        return decision

    def at_time_limit(self, now: float, committed: int) -> Decision:
        """Return what follows a save for the time limit."""
        self._forget(now, committed)
        resources = Resources(("n",), ("n",), 1, outlives_nodes=True)
        decision = self._decide(resources, now, committed, (), outcome="interrupted", asked="SIGUSR2")
        self._incidents.append(Incident(now, 1, decision.action, decision.root, committed))
        return decision

    def _forget(self, now: float, committed: int) -> None:
        """Forget what no decision depends on any more."""
        since = now - self.settings.exclude_for_s
        self._incidents = [
            incident
            for incident in self._incidents
            if incident.committed_step >= committed
            or (
                incident.time > since
                and incident.root is not None
                and incident.root.kind in (RANK_KILLED, RANK_HANG)
            )
        ][-_KEPT:]
        self._starts = [start for start in self._starts if start > now - _HOUR_S][-_KEPT:]
        self._exclusions = {
            node: incident for node, incident in self._exclusions.items() if incident.is_active(now)
        }

    def _decide(
        self, resources: Resources, now: float, committed: int, faults: tuple[Fault, ...],
        outcome: EndedAs = "failed", asked: str | None = None,
    ) -> Decision:  # fmt: skip
        attempt = AttemptSummary(now, 1, outcome, faults, committed, asked, nodes=resources.in_use)
        history = History(tuple(self._incidents), self._exclusions, tuple(self._starts))
        return decide(attempt, history, resources, self.settings)

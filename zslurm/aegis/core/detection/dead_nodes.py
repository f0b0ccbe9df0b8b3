"""Nodes that are dead, and agents that are lost.

A node's agent that misses heartbeats proves nothing: a stalled file system stops the agent of a healthy node, and
its training continues. The progress of its ranks is known only through that agent, so it is looked for elsewhere:
synchronous training cannot continue without any rank. So a node whose agent misses heartbeats is dead if,
besides, Slurm reports so, or Slurm cannot start anything there, or ranks elsewhere complain of lost peers of which
none is named, or the other ranks, whose agents report, have finished no step for longer than two usual steps take,
or one of them has passed its limit. While steps are finished, only the agent is lost. If all agents miss
heartbeats, the fault is on this side: no node is dead. So it is if all of several do but the one on the
supervisor's own node: that node may have lost its connections, and then a node is dead only if Slurm reports so.

The halt of the others proves nothing by itself if something else explains it: another node is dead, or has not
reported to a supervisor that adopted the attempt, a fault of its network lasts, or the attempt is over. The
supervisor's own node lives, unless Slurm reports it as failed; if its agent is silent as well, it is unknown what
halts the ranks there.
In phases without steps (setup, a save, an evaluation) a halt is usual, and a stalled file system likely: there it
takes Slurm's report or the peers', or the limit of the phase.

All of this takes aegis.heartbeat_timeout_s. Sooner, after aegis.ask_after_s, a node is dead if two of three
witnesses agree (witnesses.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from zslurm.aegis.core.detection.attempt_progress import LATE_S, AttemptProgress
from zslurm.aegis.core.detection.nodes import NodeState
from zslurm.aegis.core.detection.witnesses import RanksElsewhere, WitnessReport, why_dead
from zslurm.aegis.fault_kinds import AGENT_LOST, NODE_DEAD
from zslurm.aegis.types import Fault
from zslurm.train.progress import Phase

_REPORTS_APART = 1.5
"""Intervals of reports by which the own agent's last one must be newer than all others' if they are cut off."""


class DeadNodes:
    """Finds dead nodes and lost agents in the progress of an attempt."""

    def __init__(self, progress: AttemptProgress) -> None:
        """Know of no dead node at the start of an attempt."""
        self._progress = progress
        self.dead: set[str] = set()
        """Nodes that were found dead, and have not been heard since."""
        self._declared: set[str] = set()
        self._halted_by: set[str | None] = set()
        self._explained_at, self._explained_by = float("-inf"), frozenset[str | None]()
        """When something explained a halt last, and what did."""
        self._own_node: str | None = None
        self._own_silent_at = float("-inf")
        self.is_cut_off = False
        """All agents but the one on the supervisor's node are silent: that node may have lost its connections."""
        self._cut_off_at = float("-inf")

    def check(
        self,
        now: float,
        wall: float,
        declared: Mapping[str, str],
        *,
        lost_peers: bool,
        ended_at: float | None = None,
        halted_by: Collection[str | None] = (),
        own_node: str | None = None,
    ) -> list[Fault]:
        """Return what is new; see `Detector.check` for the arguments."""
        progress, self._own_node = self._progress, own_node
        unheard, nodes = progress.unheard(now), progress.nodes
        self.is_cut_off = self._is_own_node_cut_off(now)
        self._cut_off_at = now if self.is_cut_off else self._cut_off_at
        trouble = nodes.trouble(now, only_states=self.is_cut_off)
        witnesses = nodes.witness_reports()
        if own_node in unheard:
            self._own_silent_at = now
        own_is_unknown = now - self._own_silent_at <= LATE_S  # its sensors report after its agent
        self._halted_by = set(halted_by) | ({own_node} if own_is_unknown else set())
        if self._halted_by:
            self._explained_at, self._explained_by = now, frozenset(self._halted_by)
        declared_here = declared.keys() & progress.ranks_on.keys()
        asked_about = witnesses.keys() & progress.ranks_on.keys()
        outlived = {name for name, node in nodes.items() if (node.heard or 0.0) > (ended_at or float("inf"))}
        faults: list[Fault] = []
        silent = []  # and no more than that is known
        for name in sorted(((unheard | asked_about) - self.dead) | (declared_here - self._declared)):
            why = declared.get(name)
            self._declared |= {name} & declared_here
            if why is None and name in witnesses:
                why = self._confirmed(name, witnesses[name], now, lost_peers=lost_peers and name not in outlived)
            if why is None and name in unheard & trouble.keys():
                why = f"its agent misses heartbeats; {trouble[name]}"
            if why is not None and (name != own_node or name in declared):
                faults.append(self._node_dead(name, why, now, wall))
                self._halted_by.add(name)
            elif name in unheard:
                silent.append(name)
        for name in silent:
            why = None
            if (
                not self.is_cut_off
                and name != own_node
                and progress.others_report(name, now)
                and not progress.is_lost(name)
            ):
                why = self._why_dead(name, now, lost_peers=lost_peers and name not in outlived)
            if why is not None:
                faults.append(self._node_dead(name, why, now, wall))
            elif self._continues_without(name):
                faults += self._agent_lost(name, now, wall, "its ranks make progress")
            elif self.is_cut_off and name in self._halted_by:  # whether its network is up again is not known
                faults += self._agent_lost(name, now, wall, "the supervisor's node may be cut off")
        return faults

    def _is_own_node_cut_off(self, now: float) -> bool:
        """Return whether all other agents, of several, have missed heartbeats, and this node's own has not.

        Nodes that died before do not count. Agents miss heartbeats one after the other, a report's interval apart;
        between two reports all of them are silent, this node's own included.
        """
        progress = self._progress
        least_s = progress.settings.heartbeat_timeout_s - LATE_S
        others = [
            node.heard
            for name, node in progress.nodes.items()
            if node.heard is not None and name != self._own_node and name not in self.dead
        ]
        own_agent = progress.nodes.get(self._own_node or "")
        apart_s = max(LATE_S, _REPORTS_APART * progress.settings.sensors.progress_s)
        if (
            own_agent is not None
            and own_agent.heard is not None
            and others
            and own_agent.heard - max(others) <= apart_s
        ):
            return False
        return len(others) > 1 and all(now - heard >= least_s for heard in others)

    def suspects(self, now: float) -> set[str]:
        """Return the nodes whose agents miss heartbeats and that may be dead, for all that is known."""
        unheard = self._progress.unheard(now) - self.dead - {self._own_node}
        return {name for name in unheard if not self._progress.is_lost(name)}

    def by_passed_limit(self, suspects: set[str], now: float, wall: float) -> list[Fault]:
        """Return the suspects as dead if a rank elsewhere has passed its limit and their peers report.

        A limit that passed for another reason, as a fault of another node's network, proves nothing.
        """
        why = "its agent misses heartbeats, and a rank elsewhere has passed its limit without progress"
        silent = [name for name in sorted(suspects) if self._progress.others_report(name, now)]
        dead = [name for name in silent if not self._halted_by - {name}]
        return [self._node_dead(name, why, now, wall) for name in dead]

    def _confirmed(self, name: str, report: WitnessReport, now: float, *, lost_peers: bool) -> str | None:
        """Return why a node is dead by its witnesses; None if they do not agree."""
        progress = self._progress
        node = progress.nodes.get(name)
        if node is None or node.heard is None or node.heard > report.asked_at:
            return None
        ranks: RanksElsewhere = "unknown"
        if progress.front_moved > report.asked_at or self._continues_without(name):
            ranks = "moving"
        elif lost_peers:
            ranks = "lost_peers"
        elif self._halted_s(name, now, progress.settings.ask_after_s) is not None:
            ranks = "halted"
        return why_dead(report, ranks)

    def _why_dead(self, name: str, now: float, *, lost_peers: bool) -> str | None:
        """Return why an unheard node is dead, by what is seen elsewhere; None if it may be alive."""
        if lost_peers:
            return "its agent misses heartbeats, and ranks elsewhere have lost their peers"
        halted_s = self._halted_s(name, now, self._progress.settings.heartbeat_timeout_s)
        if halted_s is None or self._halted_by - {name} or self._may_another_be_dead(name):
            return None
        return f"its agent misses heartbeats, and no rank has finished a step for {halted_s:.0f} s"

    def _may_another_be_dead(self, name: str) -> bool:
        """Return whether this node has reported since the attempt was adopted, and another one has not.

        That one may have died before, which explains a halt.
        """
        progress, nodes = self._progress, self._progress.nodes
        if not progress.adopted or name not in nodes or nodes[name].heard is None:
            return False
        states = {other: nodes.get(other, NodeState()) for other in progress.ranks_on.keys() - self.dead - {name}}
        return any(state.heard is None and not state.lost for state in states.values())

    def _halted_s(self, name: str, now: float, least_s: float) -> float | None:
        """Return for how long no rank on other nodes has finished a step; None if that is nothing unusual.

        It is unusual after `least_s` and twice the usual time of a step, and only between steps. What explained a
        halt, such as a link that is up again, explains it until then.
        """
        progress, limit = self._progress, self._progress.settings.heartbeat_timeout_s
        others = [
            rank.row
            for rank in progress.ranks
            if rank.node != name and rank.row is not None and not rank.ended
            and progress.unheard_s(rank.node, now) < limit
        ]  # fmt: skip
        usual = progress.step_time_s
        if not others or usual is None or any(row.phase is not Phase.STEP for row in others):
            return None
        explained_at = self._explained_at if self._explained_by - {name} else float("-inf")
        halted_s = now - max(progress.front_moved, self._cut_off_at, explained_at)
        return halted_s if halted_s >= max(least_s, 2 * usual) else None

    def _node_dead(self, name: str, why: str, now: float, wall: float) -> Fault:
        self.dead.add(name)
        node = self._progress.nodes.get(name)
        since = wall - (now - node.heard) if node is not None and node.heard is not None else wall
        line = f"node {name} is dead: {why}"
        return Fault.of_kind(NODE_DEAD, since, "agent", line, node=name, step=self._step_on(name))

    def _step_on(self, name: str) -> int | None:
        steps = [rank.row.step for rank in self._progress.ranks if rank.node == name and rank.row is not None]
        return max(steps) if steps and max(steps) >= 0 else None

    def _continues_without(self, name: str) -> bool:
        """Return whether steps are finished though this node's agent misses heartbeats."""
        progress = self._progress
        node = progress.nodes.get(name)
        if node is None or node.heard is None:
            return progress.front_moved > progress.began + LATE_S
        return progress.front_moved > node.heard + LATE_S + (progress.step_time_s or 0.0)

    def _agent_lost(self, name: str, now: float, wall: float, how: str) -> list[Fault]:
        node = self._progress.nodes.setdefault(name, NodeState())
        if node.lost:
            return []
        node.lost = True
        unheard_s = self._progress.unheard_s(name, now)
        line = f"no heartbeat of the agent on {name} for {unheard_s:.0f} s; {how}"
        return [Fault.of_kind(AGENT_LOST, wall, "agent", line, node=name)]

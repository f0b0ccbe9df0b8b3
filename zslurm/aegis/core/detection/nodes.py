"""The one table of nodes: when their agents reported, what Slurm reports of them, what others answered about them.

Agents' reports and Slurm's answers feed it. It outlives attempts, and belongs to the detector.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.config.aegis import AegisSection

_NEIGHBOURS = 3
_AT_ONCE = 8
"""Most nodes that are asked about at a time: more that fall silent together are a matter of the network."""
_AGAIN_S, _AGAIN_LATER_S = 1.0, 5.0
_LATER_S = 15.0
"""Seconds without a heartbeat after which a node is asked about more rarely."""
_REPORTS_MISSED = 1.5
"""Missed reports after which an agent that reports more rarely than usual is asked about."""
_PATIENCE_S, _PATIENCE_REPORTS = 2.5, 3
"""An agent that has not reported for that time, or that number of reports, is not waited for."""


@dataclass(slots=True)
class NodeState:
    """What is known of a node.

    Attributes:
        heard: when its agent reported last; None before the first report.
        connected: the agent that reported last was not given up since.
        lost: the loss of its agent, and of no more, was reported as a fault.
        watches: its agent has reported about this attempt.
        slurm_state: what Slurm calls it since it misses heartbeats; empty if that is nothing bad.
        is_down: Slurm calls it down; otherwise the node only does not respond.
        unreachable: why Slurm can start nothing on it.
        witnesses: what was answered when others were asked about it.
        is_asked_about: others are being asked.
    """

    heard: float | None = None
    connected: bool = False
    lost: bool = False
    watches: bool = False
    slurm_state: str = ""
    is_down: bool = False
    unreachable: str = ""
    witnesses: WitnessReport | None = None
    is_asked_about: bool = False


class NodeTable(dict[str, NodeState]):
    """What is known of each node of which an agent or Slurm has reported something."""

    def __init__(self, settings: AegisSection) -> None:
        super().__init__()
        self._settings = settings

    # --- what comes ---------------------------------------------------------------------------------------------

    def hear(self, name: str, now: float) -> NodeState:
        """Note that the agent of a node reported: what Slurm and others reported of it is out of date."""
        if (node := self.get(name)) is None:
            node = self[name] = NodeState()
        if node.heard is None or now > node.heard:
            node.heard = now
        node.connected, node.lost = True, False
        if node.slurm_state or node.unreachable:
            node.slurm_state, node.is_down, node.unreachable = "", False, ""
        if node.witnesses is not None and node.heard > node.witnesses.asked_at:
            node.witnesses = None
        return node

    def give_up_agent(self, name: str) -> None:
        """Note that the agent of a node was given up; another one is started."""
        if name in self:
            self[name].connected = False

    def take_slurm_states(self, states: Mapping[str, str], down: Collection[str]) -> None:
        """Note what Slurm calls nodes that miss heartbeats; empty for one that is well."""
        for name, state in states.items():
            node = self.setdefault(name, NodeState())
            node.slurm_state, node.is_down = state, name in down

    def take_unreachable(self, name: str, reason: str) -> None:
        """Note why Slurm can start nothing on a node."""
        self.setdefault(name, NodeState()).unreachable = reason

    def take_witnesses(self, name: str, report: WitnessReport | None) -> None:
        """Note what was answered about a node that has not been heard since; None if nothing could be asked."""
        if (node := self.get(name)) is None:
            return
        node.is_asked_about = False
        if report is not None and (node.heard is None or node.heard <= report.asked_at):
            node.witnesses = report

    def forget(self, names: Collection[str]) -> None:
        """Forget nodes that died: no agent is started there any more."""
        for name in names:
            self.pop(name, None)

    def excuse(self, seconds: float, now: float) -> None:
        """Count a time in which no report could be read as no agent's missed heartbeat."""
        for node in self.values():
            node.heard = None if node.heard is None else min(now, node.heard + seconds)

    # --- what is known ------------------------------------------------------------------------------------------

    def silent(self, seconds: float, now: float) -> set[str]:
        """Return the nodes whose agent has reported once, and not for a number of seconds."""
        return {name for name, node in self.items() if node.heard is not None and now - node.heard > seconds}

    @property
    def patience_s(self) -> float:
        """Seconds after which an agent that has not reported is not waited for."""
        return max(_PATIENCE_S, _PATIENCE_REPORTS * self._settings.sensors.progress_s)

    def reporting(self, now: float) -> set[str]:
        """Return the nodes whose agent reports: it is worth asking it something."""
        return {
            name
            for name, node in self.items()
            if node.connected and node.heard is not None and now - node.heard <= self.patience_s
        }

    def any_responding(self, now: float) -> bool:
        """Return whether at least one agent has reported within aegis.heartbeat_timeout_s."""
        limit = self._settings.heartbeat_timeout_s
        return any(
            node.connected and node.heard is not None and now - node.heard < limit for node in self.values()
        )

    def trouble(self, now: float, *, only_states: bool = False) -> dict[str, str]:
        """Return the nodes that may well be dead by what Slurm does or reports, each with a message.

        While no agent reports at all, those are only the nodes that Slurm calls down: a controller that has just
        come back starts nothing anywhere, and has not heard of any node yet.

        Args:
            now: monotonic seconds.
            only_states: only by the states that Slurm reports, not because srun here could start nothing there.
        """
        troubled = {
            name: node for name, node in self.items() if node.slurm_state or (node.unreachable and not only_states)
        }
        responding = bool(troubled) and self.any_responding(now)
        return {
            name: node.slurm_state or node.unreachable
            for name, node in troubled.items()
            if responding or (node.slurm_state and node.is_down)
        }

    def witness_reports(self) -> dict[str, WitnessReport]:
        """Return what was answered about each node that has not been heard since it was asked about."""
        return {name: node.witnesses for name, node in self.items() if node.witnesses is not None}

    # --- who is asked about -------------------------------------------------------------------------------------

    def begin_questions(self, now: float, in_order: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the silent nodes to ask about from now on, each with the nearest nodes whose agents report.

        None is asked about if most are silent: then it is the supervisor's side that hears nothing.

        Args:
            now: monotonic seconds.
            in_order: the nodes of the attempt, in the order of ranks; no other node is asked about.
        """
        if self._settings.ask_after_s == 0:
            return {}
        after_s = max(self._settings.ask_after_s, _REPORTS_MISSED * self._settings.sensors.progress_s)
        silent = self.silent(after_s, now)
        if not silent or 2 * len(silent) > len(self):
            return {}
        due = [name for name in in_order if name in silent and self._is_due(self[name], now)]
        free = max(0, _AT_ONCE - sum(node.is_asked_about for node in self.values()))
        every = dict.fromkeys([*in_order, *self])
        places = {name: positions for positions, name in enumerate(every) if name in self}
        asked = due[:free]
        for name in asked:
            self[name].is_asked_about = True
        return {name: _nearest(places, name, silent) for name in asked}

    def _is_due(self, node: NodeState, now: float) -> bool:
        assert node.heard is not None
        again_s = _AGAIN_S if now - node.heard < _LATER_S else _AGAIN_LATER_S
        return not node.is_asked_about and (node.witnesses is None or now - node.witnesses.asked_at >= again_s)


def _nearest(places: Mapping[str, int], name: str, silent: Collection[str]) -> tuple[str, ...]:
    """Return the nodes nearest to one that are not silent."""
    near = (neighbour for neighbour in places if neighbour not in silent)
    return tuple(sorted(near, key=lambda neighbour: abs(places[neighbour] - places[name]))[:_NEIGHBOURS])

"""The connections to the agents: which are up, and when the next agent of a node is started.

What is known of the nodes themselves is in the core's table (core/detection/nodes.py).

The threads of agents.py and keeper.py share one `Liveness`. Each of its methods takes its lock; who reads or
changes several nodes at once, or `nodes` and `links` directly, holds the lock meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zslurm.aegis.core.detection.attempt_progress import STARTUP_TIMEOUT_S
from zslurm.aegis.supervisor.agents.link import AgentLink

PARTS_BEFORE_FIRST_REPORT = 8
"""Parts into which a refused step is divided at most while no agent has reported. Then a node is hardly why Slurm
refuses steps: the controller may be away."""

_LONGEST_PAUSE_S = 300.0
# An agent that lived so long was well: its next loss begins with the shortest pause.
_LIVED_S = 60.0


@dataclass
class NodeAgent:
    """What is known of the agent on one node.

    Attributes:
        link: the command that started the present agent; None if a new one is due.
        heard: when the agent of the present link reported last.
        last_heard: when any agent of the node reported last.
        lost: its loss was recorded, and it has not reported since.
        max_step_nodes: most nodes of a step with this one, since Slurm refused a larger step; None: any number.
        failures: agents that were lost in a row.
        retry_at: when the next one may be started (monotonic seconds).
        unreachable: why Slurm could start nothing on the node.
        slurm_state: what Slurm calls a node whose agent is not heard: none is started there meanwhile.
    """

    link: AgentLink | None = None
    heard: float | None = None
    last_heard: float | None = None
    lost: bool = False
    max_step_nodes: int | None = None
    failures: int = 0
    retry_at: float = 0.0
    unreachable: str = ""
    slurm_state: str = ""

    def is_starting(self, now: float) -> bool:
        """Return whether a new agent was started, and may still report for the first time."""
        return self.link is not None and self.heard is None and now - self.link.started < STARTUP_TIMEOUT_S

    def take_report(self, now: float) -> None:
        """Note that the agent reported."""
        self.heard = self.last_heard = now
        self.lost, self.unreachable, self.slurm_state, self.max_step_nodes = False, "", "", None

    def replace_later(self, now: float) -> None:
        """Give the present agent up; the next one may start at once after a long life, else after a pause."""
        if self.link is not None and self.heard is not None and now - self.link.started > _LIVED_S:
            self.failures = 0
        self.link = self.heard = None
        self.retry_at = now + (_pause_s(self.failures) if self.failures else 0.0)
        self.failures += 1

    def could_not_start(self, now: float) -> None:
        """Note that the command could not be started at all."""
        self.failures += 1
        self.retry_at = now + _pause_s(self.failures)


class Liveness:
    """The agents of one supervisor, node by node."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        """Know of no node yet; an agent is lost after `heartbeat_timeout_s` without a report."""
        self.lock = threading.RLock()
        self.nodes: dict[str, NodeAgent] = {}
        self.links: list[AgentLink] = []
        """The commands that are being read, each with agents on some nodes."""
        self._timeout_s = heartbeat_timeout_s

    def begin(self, nodes: Iterable[str]) -> None:
        """Expect an agent on each of these nodes."""
        with self.lock:
            self.nodes = {node: NodeAgent() for node in nodes}

    def forget(self, nodes: Iterable[str]) -> None:
        """Expect no agent on these nodes any more: they are dead or excluded."""
        with self.lock:
            for node in nodes:
                self.nodes.pop(node, None)

    def never_heard(self, nodes: Iterable[str]) -> list[str]:
        """Return those of these nodes whose agents have not reported yet."""
        with self.lock:
            return [name for name in nodes if name in self.nodes and self.nodes[name].last_heard is None]

    def present_links(self) -> list[AgentLink]:
        """Return the commands that are being read now."""
        with self.lock:
            return list(self.links)

    def any_responding(self) -> bool:
        """Return whether at least one agent has reported within aegis.heartbeat_timeout_s."""
        now = time.monotonic()
        with self.lock:
            return any(
                node.heard is not None and now - node.heard < self._timeout_s for node in self.nodes.values()
            )

    def hears_only(self, name: str | None) -> bool:
        """Return whether no agent but that of this node reports, of several; see `any_responding`."""
        since = time.monotonic() - self._timeout_s
        with self.lock:
            others = [node.heard for other, node in self.nodes.items() if other != name]
        return len(others) > 1 and not any(heard is not None and heard > since for heard in others)

    def missed(self, seconds: float, now: float) -> dict[str, float]:
        """Return the nodes whose agent has reported once and not for so long, with the seconds since."""
        with self.lock:
            last = {name: node.last_heard for name, node in self.nodes.items()}
        return {name: now - heard for name, heard in last.items() if heard is not None and now - heard > seconds}

    def any_heard(self) -> bool:
        """Return whether the agent of any present link has reported."""
        with self.lock:
            return any(node.heard is not None for node in self.nodes.values())

    def of(self, link: AgentLink) -> dict[str, NodeAgent]:
        """Return the nodes whose present agent a link has started."""
        with self.lock:
            return {name: node for name, node in self.nodes.items() if node.link is link}

    def excuse(self, seconds: float, now: float) -> None:
        """Count no heartbeat as missed, and no command as not taken, while this process itself was stopped."""
        with self.lock:
            for node in self.nodes.values():
                node.heard = None if node.heard is None else min(now, node.heard + seconds)
            for link in self.links:
                link.excuse(seconds, now)

    def bisect(self, nodes: Mapping[str, NodeAgent]) -> bool:
        """Have these nodes start in smaller steps: Slurm refuses a step as a whole for one node that is gone.

        Returns:
            False if the step cannot be made smaller: an agent has reported, or it was small enough.
        """
        least = 1 if self.any_heard() else max(1, len(self.nodes) // PARTS_BEFORE_FIRST_REPORT)
        most = max(least, len(nodes) // 2)
        if most >= len(nodes) or any(node.heard is not None for node in nodes.values()):
            return False
        for node in nodes.values():
            node.link, node.max_step_nodes = None, most
        return True

    def due_steps(self, now: float, at_once: int) -> list[list[str]]:
        """Return the nodes of each step that is to be started now.

        Args:
            now: monotonic seconds.
            at_once: most steps that may be starting at the same time, those that start already included.
        """
        due = [
            name
            for name, node in self.nodes.items()
            if node.link is None and now >= node.retry_at and not node.slurm_state
        ]
        refused = [name for name in due if self.nodes[name].max_step_nodes is not None]
        single = [name for name in due if self.nodes[name].max_step_nodes is None]
        whole_steps: list[list[str]] = []
        if single and (len(single) == len(self.nodes) or len(single) > 4 * at_once):
            whole_steps, single = [single], []  # the whole step was lost
        starting = {node.link for node in self.nodes.values() if node.is_starting(now)}
        parts = [[name] for name in single] + self._parts(refused)
        return whole_steps + parts[: max(0, at_once - len(starting) - len(whole_steps))]

    def _parts(self, names: Iterable[str]) -> list[list[str]]:
        """Divide nodes of refused steps into smaller steps, those of the largest first."""
        of_size: dict[int, list[str]] = {}
        for name in names:
            of_size.setdefault(self.nodes[name].max_step_nodes or 1, []).append(name)
        return [
            together[at : at + size]
            for size, together in sorted(of_size.items(), reverse=True)
            for at in range(0, len(together), size)
        ]


def _pause_s(failures: int) -> float:
    return min(_LONGEST_PAUSE_S, 2.0**failures)

"""The connections to the agents: which are up, and when the next agent of a node is started.

What is known of the nodes themselves is in the core's table (core/detection/nodes.py). When an agent is given up,
and when the next one is started, is decided in core/agents.py.

The threads of agents.py and keeper.py share one `Liveness`. Each of its methods takes its lock; who reads or
changes several nodes at once, or `nodes` and `links` directly, holds the lock while it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from zslurm.aegis.core.agents import NodeAgent, any_heard, bisect, due_steps
from zslurm.aegis.supervisor.agents.link import AgentLink


class Liveness:
    """The agents of one supervisor, node by node."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        """Know of no node yet; an agent is lost after `heartbeat_timeout_s` without a report."""
        self.lock = threading.RLock()
        self.nodes: dict[str, NodeAgent[AgentLink]] = {}
        self.links: list[AgentLink] = []
        """The commands that are being read, each with agents on some nodes."""
        self._timeout_s = heartbeat_timeout_s

    def begin(self, nodes: Iterable[str]) -> None:
        """Expect an agent on each of these nodes."""
        with self.lock:
            self.nodes = {node: NodeAgent() for node in nodes}

    def add(self, nodes: Iterable[str]) -> None:
        """Expect an agent on these nodes as well."""
        with self.lock:
            for node in nodes:
                self.nodes.setdefault(node, NodeAgent())

    def forget(self, nodes: Iterable[str]) -> None:
        """Expect no agent on these nodes any more: they are dead or excluded."""
        with self.lock:
            for node in nodes:
                self.nodes.pop(node, None)

    def never_heard(self, nodes: Iterable[str]) -> list[str]:
        """Return which of these nodes have agents that have not reported yet."""
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
        """Return whether no agent but this node's reports, of several; see `any_responding`."""
        since = time.monotonic() - self._timeout_s
        with self.lock:
            others = [node.heard for other, node in self.nodes.items() if other != name]
        return len(others) > 1 and not any(heard is not None and heard > since for heard in others)

    def missed(self, seconds: float, now: float) -> dict[str, float]:
        """Return the nodes whose agent has reported once, but not in that time, with the seconds since."""
        with self.lock:
            last = {name: node.last_heard for name, node in self.nodes.items()}
        return {name: now - heard for name, heard in last.items() if heard is not None and now - heard > seconds}

    def any_heard(self) -> bool:
        """Return whether the agent of any present link has reported."""
        with self.lock:
            return any_heard(self.nodes)

    def of(self, link: AgentLink) -> dict[str, NodeAgent[AgentLink]]:
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

    def bisect(self, nodes: Mapping[str, NodeAgent[AgentLink]]) -> bool:
        """Have these nodes start in smaller steps; see `core.agents.bisect`."""
        with self.lock:
            return bisect(self.nodes, nodes)

    def due_steps(self, now: float, at_once: int) -> list[list[str]]:
        """Return the nodes of each step that is to be started now; see `core.agents.due_steps`."""
        with self.lock:
            return due_steps(self.nodes, now, at_once)

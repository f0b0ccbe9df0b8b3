"""Keeps an agent alive on each node: one thread starts them, notices lost ones and starts those again.

It waits for nothing: what asks Slurm, or ends a step, runs in a separate thread. If Slurm refuses a step as a
whole, as it does for one node that is gone, the step is bisected until the other nodes have their agents.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from zslurm.aegis.core.agents import NodeAgent, why_given_up, why_step_given_up
from zslurm.aegis.core.detection.attempt_progress import STARTUP_TIMEOUT_S
from zslurm.aegis.core.messages import AgentGivenUp, CoreEvent, NodeUnreachable, SlurmAnswered
from zslurm.aegis.protocol import Command, encode_command
from zslurm.aegis.supervisor.agents.link import AgentLink
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.aegis.supervisor.agents.step import AgentLauncher
from zslurm.config.aegis import AegisSection
from zslurm.core.errors import ZslurmError
from zslurm.core.pauses import PauseReader, Pauses
from zslurm.run.events import AgentLost, AgentsStarted, AgentsUnavailable
from zslurm.run.events.event import Event
from zslurm.slurm.hostlist import compress

_KEEP_S = 0.25
_LONGEST_PAUSE_S = 300.0
_STARTS_AT_ONCE = 4
_SLURM_STATE_S = 3.0


class AgentKeeper:
    """Starts the agents of a supervisor, and starts those again that are lost."""

    def __init__(
        self,
        settings: AegisSection,
        liveness: Liveness,
        launcher: AgentLauncher,
        *,
        pauses: Pauses,
        present_attempt: Callable[[], int],
        on_line: Callable[[AgentLink, bytes], None],
        record: Callable[[Event], None],
        tell: Callable[[CoreEvent], None],
        in_thread: Callable[[str, Callable[[], None]], None],
    ) -> None:
        """Prepare; `run` starts the agents.

        `pauses` are this process's.
        `tell` takes what is new for the core. `in_thread(name, work)` runs something in a separate thread.
        """
        self._timeout_s = settings.heartbeat_timeout_s
        self._liveness, self._launcher, self._pauses = liveness, launcher, pauses
        self._present_attempt, self._adopted = present_attempt, present_attempt()
        self._on_line, self._record, self._tell, self._in_thread = on_line, record, tell, in_thread
        self._numbers = itertools.count(1)
        self._started_recorded = self._unavailable_recorded = False
        self._asking_slurm = threading.Event()

    def run(self) -> None:
        """Start the agents and keep them alive until the supervisor ends them."""
        liveness, over = self._liveness, self._launcher.over
        pauses = PauseReader(self._pauses)
        with liveness.lock:
            self._start_step(list(liveness.nodes))
        while not over.wait(_KEEP_S):
            looked, paused_s = time.monotonic(), pauses.new_s()
            with liveness.lock:
                if paused_s > 0:  # what came meanwhile is still to be read
                    liveness.excuse(paused_s, looked)
                self._record_started(looked)
                self._check_links(looked)
                self._check_heartbeats(looked)
                for nodes in liveness.due_steps(looked, _STARTS_AT_ONCE):
                    self._start_step(nodes)
                missed = liveness.missed(self._timeout_s / 2, looked)
            if missed and self._launcher.on_slurm and not self._asking_slurm.is_set():
                self._asking_slurm.set()
                self._in_thread("ask-slurm", self._ask_slurm)

    def unavailable(self, reason: str) -> None:
        """Record once that no agent can run."""
        if not self._unavailable_recorded:
            self._unavailable_recorded = True
            self._record(AgentsUnavailable(reason=reason))

    def _record_started(self, now: float) -> None:
        nodes = self._liveness.nodes
        reporting = [name for name, node in nodes.items() if node.heard is not None]
        late = any(now - link.started > STARTUP_TIMEOUT_S for link in self._liveness.links)
        if not self._started_recorded and reporting and (late or len(reporting) == len(nodes)):
            self._started_recorded = True
            self._record(AgentsStarted(generation=self._launcher.generation, nodes=compress(reporting)))

    # --- lost agents --------------------------------------------------------------------------------------------

    def _check_links(self, now: float) -> None:
        """See what srun reports of its agents, and whether it still takes what we write."""
        for link in self._liveness.present_links():
            own_nodes = self._liveness.of(link)
            if link.refused and self._liveness.bisect(own_nodes):
                self._end(link)
                continue
            for name, why in link.without_node().items():
                if name in own_nodes and own_nodes[name].unreachable != why:
                    own_nodes[name].unreachable = why
                    self._tell(NodeUnreachable(name, why))
            for name, why in link.ended().items():
                if name in own_nodes:
                    self.mark_lost(name, own_nodes[name], why, now)
            if why := why_step_given_up(link.stuck_for(now)):
                for name, node in own_nodes.items():
                    self.mark_lost(name, node, why, now)
                self._end(link)
            elif link.over or not own_nodes:
                self._end(link)

    def _check_heartbeats(self, now: float) -> None:
        for name, node in self._liveness.nodes.items():
            if why := why_given_up(node, now, self._timeout_s):
                self.mark_lost(name, node, why, now)

    def mark_lost(self, name: str, node: NodeAgent[AgentLink], why: str, now: float) -> None:
        """Give an agent up; another will be started, each time after a longer pause. Hold the lock."""
        if node.link is None:
            return
        if self._started_recorded:
            if not node.lost:
                self._record(AgentLost(node=name, reason=why))
            node.lost = True
        elif node.failures >= 1 and not self._liveness.any_heard():
            self.unavailable(why)
        if not node.link.over:  # should it wake up again
            node.link.write(encode_command(Command("quit", nodes=(name,))))
        node.replace_later(now)
        self._tell(AgentGivenUp(name))

    # --- links --------------------------------------------------------------------------------------------------

    def _start_step(self, nodes: list[str]) -> None:
        parts: dict[str | None, list[str]] = {}
        for node in nodes:
            parts.setdefault(self._launcher.helper_of.get(node), []).append(node)
        for nodes_of_job in parts.values():
            self._start_step_in_job(nodes_of_job)

    def _start_step_in_job(self, nodes: list[str]) -> None:
        if self._launcher.over.is_set():
            return
        agents = self._liveness.nodes
        # Agents before these have seen how an attempt began; the first of all see it themselves.
        attempt = self._present_attempt()
        watched = attempt if self._started_recorded or attempt == self._adopted else 0
        try:
            link = self._launcher.start(nodes, next(self._numbers), watched, self._on_line)
        except OSError as error:
            self.unavailable(f"{error.filename or 'the step'}: {error.strerror}")
            for name in nodes:
                agents[name].could_not_start(time.monotonic())
            return
        self._liveness.links.append(link)
        for name in nodes:
            agents[name].link, agents[name].heard = link, None

    def _end(self, link: AgentLink) -> None:
        if link in self._liveness.links:
            self._liveness.links.remove(link)
        self._in_thread("end", lambda: self._launcher.end(link))

    def _ask_slurm(self) -> None:
        """Ask Slurm for the state of the nodes whose agents miss heartbeats."""
        missed: dict[str, float] = {}
        try:
            nodes = {node.name: node for node in self._launcher.client().nodes()}
            with self._liveness.lock:
                missed = self._liveness.missed(self._timeout_s / 2, time.monotonic())
                node_info = {name: nodes.get(name) for name in missed}
                states = {
                    name: f"Slurm reports {node.trouble}" if node is not None and node.trouble else ""
                    for name, node in node_info.items()
                }
                for name, state in states.items():
                    self._liveness.nodes[name].slurm_state = state
            down = frozenset(name for name, node in node_info.items() if node is not None and node.is_down)
            self._tell(SlurmAnswered(states, down))
        except ZslurmError:
            pass
        finally:
            # Ever more rarely: a node may be away for days.
            pause_s = max(_SLURM_STATE_S, min(missed.values(), default=0.0) / 10)
            self._launcher.over.wait(min(_LONGEST_PAUSE_S, pause_s))
            self._asking_slurm.clear()

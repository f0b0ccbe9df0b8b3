"""The supervisor's side of the agents: starts one on each node, tells them that it lives, hears what they report.

On Slurm they are one step beside the training, `srun --overlap --no-kill`, whose standard input and output are the
only connection: no port, no file. Elsewhere the agent is a child process. The agents of a supervisor are a
generation: before they start it takes the run's lease in their name, and renews it (supervisor_lease.py), so that
agents which no pipe reaches any more know whether they were replaced. Its successor starts its own and ends the
older ones.

    agents = Agents(settings, event)
    agents.start(spec, run, job_id, nodes, environ)
    while ...:
        agents.attempt = 3
        for heard in agents.reports():
            detector.feed(heard.report, heard.time)
    agents.stop()

Nothing here raises into the supervisor, and nothing waits for Slurm in its thread. Four kinds of threads do the
work: one sends the heartbeat every second, whatever the others wait for; one renews the lease; one keeps the
agents alive, which means starting them and asking Slurm about silent nodes; two for each link read. Where no agent
can be started the supervisor goes on without, and one event says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zslurm.aegis.protocol import (
    BATCH_NODE,
    AgentReport,
    Answer,
    Command,
    CommandName,
    Heartbeat,
    Report,
    decode_report,
    encode_command,
    joined,
)
from zslurm.aegis.supervisor.agent_connection import AgentLink
from zslurm.config.aegis import AegisSection
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmUnavailable, ZslurmError
from zslurm.core.processes import ProcessRecord
from zslurm.run import supervisor_lease
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.environment import step_environment
from zslurm.slurm.hostlist import compress
from zslurm.slurm.inventory import Node
from zslurm.slurm.version import OVERLAP_SHARES_GPUS

STEP_PREFIX = "agents-"
"""What the names of the agents' steps begin with; the generation follows."""

AGENT = (sys.executable, "-u", "-m", "zslurm.aegis.agent.main")

_BEAT_S = 1.0
# A pipe takes a line at once, unless srun has read nothing for many minutes.
_WRITE_S = 0.5
_KEEP_S = 0.25
# srun, and Python's imports from a file system that a thousand nodes read at once.
_FIRST_WORD_S = 90.0
# How long srun may leave what we write before it counts as stuck; well below the patience of the deputies.
_STUCK_S = 6.0
_LONGEST_PAUSE_S = 300.0
# An agent that lived so long was well: its next loss begins with the shortest pause.
_LIVED_S = 60.0
_STARTS_AT_ONCE = 4
# While no agent speaks, a node is hardly why Slurm refuses steps: the controller may be away.
_PARTS_WHILE_SILENT = 8
_SLURM_SAYS_S = 3.0
_AGAIN_S = 5.0
_AWAY_S = 3.0
_KEPT_REPORTS = 50_000


@dataclass(frozen=True)
class Heard:
    """A report, and when it came.

    Attributes:
        time: monotonic seconds of this process.
    """

    time: float
    report: Report


@dataclass
class _Node:
    """What is known of the agent on one node."""

    link: AgentLink | None = None
    heard: float | None = None
    """Last word over the present link."""
    last_word: float | None = None
    """Last word over any."""
    lost: bool = False
    """It was said to be lost, and has not spoken since."""
    company: int | None = None
    """Most nodes of a step with this one, since Slurm refused a larger one; None: any number."""
    failures: int = 0
    retry_at: float = 0.0
    unreachable: str = ""
    slurm_says: str = ""
    is_down: bool = False
    """Slurm says so; otherwise it only hears nothing of the node."""

    def starting(self, now: float) -> bool:
        """A new one was started, and may yet say its first word."""
        return self.link is not None and self.heard is None and now - self.link.started < _FIRST_WORD_S


class Agents:
    """The agents of one supervisor."""

    def __init__(self, settings: AegisSection, event: Callable[..., None], program: Sequence[str] = AGENT) -> None:
        """Prepare; nothing is started.

        Args:
            settings: of the run.
            event: `event(kind, **fields)` records what became of the agents; called only in the thread that calls
                `reports`.
            program: the words that start an agent; the run's directory and `--generation` follow.
        """
        self.attempt = 0
        """The attempt that the heartbeat tells the agents to watch; the supervisor sets it."""
        self.generation = f"{int(time.time()):x}-{secrets.token_hex(3)}"
        self._settings, self._event, self._program = settings, event, tuple(program)
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._nodes: dict[str, _Node] = {}
        self._links: list[AgentLink] = []
        self._reports: deque[Heard] = deque(maxlen=_KEPT_REPORTS)
        self._events: deque[tuple[str, dict[str, Any]]] = deque()
        self._answers: dict[int, dict[str, list[Answer]]] = {}
        self._ids = itertools.count(1)
        self._link_numbers = itertools.count(1)
        self._told_started = self._told_unavailable = False
        self._adopted = 0
        self._over = threading.Event()
        self._asking_slurm = threading.Event()

    # --- start and end --------------------------------------------------------------------------------------

    def start(
        self, spec: RunSpec, run: RunDir, job_id: str, nodes: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """Start an agent on each node, in the background; end those of an earlier supervisor of this job.

        Args:
            spec: the run.
            run: its directory.
            job_id: the job that this process runs in.
            nodes: all nodes of the job, spares too.
            environ: the environment of the job.

        Where an earlier supervisor's attempt goes on, `attempt` is set before.
        """
        self._spec, self._run, self._job_id, self._environ = spec, run, job_id, dict(environ)
        self._on_slurm = spec.cluster.launcher == "slurm"
        self._adopted = self.attempt
        with self._lock:
            self._nodes = {node: _Node() for node in nodes}
        self._in_thread("beat", self._beat)
        self._in_thread("keep", self._keep)
        if self._on_slurm:
            self._in_thread("renew", self._renew)
        if self._on_slurm:
            self._in_thread("end-older", self._end_older)

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        """Do something beside everything else. A mistake in it is recorded, and costs the supervisor nothing."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                with self._lock:
                    reason = f"{name}: {type(error).__name__}: {error}"
                    self._events.append(("agents_unavailable", {"reason": reason}))

        threading.Thread(target=guarded, daemon=True, name=f"agents-{name}").start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Tell the agents to quit, and end their steps; waits no longer than this."""
        deadline = time.monotonic() + timeout_s
        self.send(Command("quit"))
        self._over.set()
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.close_input()
        left = [link for link in links if not link.wait(max(0.1, min(5.0, deadline - time.monotonic())))]
        if left and self._on_slurm:
            killer = threading.Thread(target=self._kill_steps, args=([link.name for link in left],), daemon=True)
            killer.start()
            killer.join(max(0.1, deadline - time.monotonic()))
        for link in left:
            link.kill()
        if not self._on_slurm:
            self._record.unlink(missing_ok=True)

    def forget(self, nodes: Sequence[str]) -> None:
        """These nodes are dead or excluded: start no agent there any more, and expect none."""
        with self._lock:
            for node in nodes:
                self._nodes.pop(node, None)

    # --- what comes -----------------------------------------------------------------------------------------

    def reports(self) -> list[Heard]:
        """What the agents reported since the last call, oldest first; answers to `ask` are not among it.

        Also records, through `event`, what became of the agents themselves.
        """
        with self._lock:
            heard, events = list(self._reports), list(self._events)
            self._reports.clear()
            self._events.clear()
        for kind, fields in events:
            self._event(kind, **fields)
        return heard

    def watched(self) -> bool:
        """Whether at least one agent spoke within aegis.silent_s."""
        now = time.monotonic()
        with self._lock:
            return any(
                node.heard is not None and now - node.heard < self._settings.silent_s
                for node in self._nodes.values()
            )

    def quiet(self, seconds: float) -> set[str]:
        """Nodes whose agent has said nothing for so long, or never did."""
        now = time.monotonic()
        with self._lock:
            return {name for name, node in self._nodes.items() if node.heard is None or now - node.heard > seconds}

    def fell_silent(self, seconds: float) -> set[str]:
        """Nodes whose agent spoke once, and has said nothing for so long."""
        now = time.monotonic()
        with self._lock:
            return {
                name
                for name, node in self._nodes.items()
                if node.last_word is not None and now - node.last_word > seconds
            }

    def unreachable(self) -> dict[str, str]:
        """Silent nodes on which Slurm can start nothing, with its words: they may well be dead.

        None while no agent speaks at all: a controller that has just come back starts nothing anywhere.
        """
        if not self.watched():
            return {}
        with self._lock:
            return {name: node.unreachable for name, node in self._nodes.items() if node.unreachable}

    def slurm_says(self) -> dict[str, str]:
        """Silent nodes that Slurm calls down or not responding, with its word.

        While no agent speaks at all, only those that are down: a controller that has just come back has not heard
        of any node yet.
        """
        watched = self.watched()
        with self._lock:
            return {
                name: node.slurm_says
                for name, node in self._nodes.items()
                if node.slurm_says and (watched or node.is_down)
            }

    # --- what goes ------------------------------------------------------------------------------------------

    def send(self, command: Command) -> bool:
        """Give the agents a command; False where a link did not take it."""
        line = encode_command(command)
        with self._lock:
            links = list(self._links)
        taken = [link.write(line, _WRITE_S) for link in links]
        return all(taken)

    def ask(
        self,
        do: CommandName,
        nodes: Sequence[str] = (),
        *,
        timeout_s: float,
        attempt: int | None = None,
        kill: bool = True,
    ) -> dict[str, Answer]:
        """Have something done on these nodes, and wait for what came of it.

        Reports that come meanwhile are kept for `reports`.

        Args:
            do: what.
            nodes: where; default: everywhere.
            timeout_s: so long; who has not answered then is missing in the result.
            attempt: the attempt that it is about; default: the present one.
            kill: of `sweep`.
        """
        with self._lock:
            asked = set(nodes or self._nodes) & set(self._nodes)
            number = next(self._ids)
            self._answers[number] = {}
            named = () if asked == set(self._nodes) else tuple(sorted(asked))
        about = self.attempt if attempt is None else attempt
        try:
            if asked:
                self.send(Command(do, id=number, attempt=about, kill=kill, nodes=named))
            deadline = time.monotonic() + timeout_s
            with self._answered:
                self._answered.wait_for(
                    lambda: asked <= self._complete(number).keys(), max(0.0, deadline - time.monotonic())
                )
                return {node: answer for node, answer in self._complete(number).items() if node in asked}
        finally:
            with self._lock:
                del self._answers[number]

    def _complete(self, number: int) -> dict[str, Answer]:
        parts = self._answers.get(number, {})
        return {node: joined(lines) for node, lines in parts.items() if lines[-1].done}

    # --- threads --------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Every second, and whatever else waits: the supervisor lives."""
        while not self._over.is_set():
            line = encode_command(Heartbeat(time.time(), self.attempt, self.generation))
            with self._lock:
                links = list(self._links)
            for link in links:
                link.write(line)
            self._over.wait(_BEAT_S)

    def _take_lease(self) -> None:
        """Before the first agent starts: it must find its own generation in the file."""
        with contextlib.suppress(OSError):  # `_renew` tries again
            supervisor_lease.take(self._run, self.generation)

    def _renew(self) -> None:
        """Renew the lease; the run directory may hang, which must not delay the heartbeat."""
        told = False
        while not self._over.wait(supervisor_lease.RENEW_S):
            with contextlib.suppress(OSError):
                lease = supervisor_lease.read(self._run)
                if lease is None or lease.generation is None:
                    supervisor_lease.take(self._run, self.generation)
                elif not supervisor_lease.renew(self._run, self.generation) and not told:
                    told = True
                    with self._lock:
                        self._events.append(("lease_lost", {"generation": lease.generation}))

    def _on_line(self, link: AgentLink, line: bytes) -> None:
        """A line of output: called in the threads of the links."""
        report = decode_report(line)
        if report is None:
            return
        now = time.monotonic()
        with self._lock:
            if not self._on_slurm and self._nodes:
                # The one agent need not call this machine what we call it.
                report = replace(report, stamp=replace(report.stamp, node=next(iter(self._nodes))))
            name = report.stamp.node
            node = self._nodes.get(name)
            link.spoke = True
            if node is None or node.link is not link:
                return  # a forgotten node, or the agent that another one has replaced
            if node.heard is None and node.failures and node.lost:
                self._events.append(("agent_restarted", {"nodes": name}))
            node.heard = node.last_word = now
            node.lost, node.unreachable, node.slurm_says, node.company = False, "", "", None
            if isinstance(report, Answer):
                if report.id in self._answers:
                    self._answers[report.id].setdefault(name, []).append(report)
                    self._answered.notify_all()
                return
            if isinstance(report, AgentReport) and report.event == "ended":
                self._lose(name, node, "the agent ended: " + str(report.values.get("reason", "no reason")), now)
            self._reports.append(Heard(now, report))

    def _keep(self) -> None:
        """Start agents, and start those again that are lost."""
        reason = self._why_impossible()
        if reason is not None:
            self._unavailable(reason)
            return
        if self._on_slurm:
            self._take_lease()
        looked = time.monotonic()
        with self._lock:
            self._start_link(list(self._nodes))
        while not self._over.wait(_KEEP_S):
            before, looked = looked, time.monotonic()
            with self._lock:
                if looked - before > _AWAY_S:  # we were stopped: what came meanwhile is still to be read
                    self._excuse(looked - before)
                self._tell_started(looked)
                self._look_at_links(looked)
                self._look_at_nodes(looked)
                self._start_lost(looked)
                silent = self._silent_nodes(looked)
            if silent and self._on_slurm and not self._asking_slurm.is_set():
                self._asking_slurm.set()
                self._in_thread("ask-slurm", self._ask_slurm)

    def _excuse(self, seconds: float) -> None:
        for node in self._nodes.values():
            node.heard = None if node.heard is None else node.heard + seconds

    def _silent_nodes(self, now: float) -> dict[str, float]:
        """Nodes that spoke once, and for how long they have not."""
        limit = self._settings.silent_s / 2
        words = {name: node.last_word for name, node in self._nodes.items()}
        return {name: now - word for name, word in words.items() if word is not None and now - word > limit}

    def _why_impossible(self) -> str | None:
        """Why no agent can run here; None where they can."""
        if not self._on_slurm:
            return None
        try:
            version = SlurmClient(self._environ, timeout_s=10.0).version()
        except ZslurmError as error:
            return str(error)
        if version < OVERLAP_SHARES_GPUS:
            return f"agents need Slurm 22.05 or newer, where steps can share a job's GPUs; this is {version}"
        return None

    def _unavailable(self, reason: str) -> None:
        with self._lock:
            if not self._told_unavailable:
                self._told_unavailable = True
                self._events.append(("agents_unavailable", {"reason": reason}))

    def _tell_started(self, now: float) -> None:
        spoke = [name for name, node in self._nodes.items() if node.heard is not None]
        late = any(now - link.started > _FIRST_WORD_S for link in self._links)
        if not self._told_started and spoke and (late or len(spoke) == len(self._nodes)):
            self._told_started = True
            self._events.append(("agents_started", {"generation": self.generation, "nodes": compress(spoke)}))

    def _look_at_links(self, now: float) -> None:
        """What srun says of its agents, and whether it still takes what we write."""
        for link in list(self._links):
            mine = {name: node for name, node in self._nodes.items() if node.link is link}
            if link.refused and self._divide(mine):
                self._end_link(link)
                continue
            for name, why in link.without_node().items():
                if name in mine:
                    mine[name].unreachable = why
            for name, why in link.ended().items():
                if name in mine:
                    self._lose(name, mine[name], why, now)
            if link.stuck_for(now) > _STUCK_S:
                for name, node in mine.items():
                    self._lose(name, node, "srun takes no more commands for its agents", now)
                self._end_link(link)
            elif link.over or not mine:
                self._end_link(link)

    def _divide(self, nodes: Mapping[str, _Node]) -> bool:
        """Have these nodes start in smaller steps: Slurm refuses a step as a whole for one node that is gone.

        Returns:
            False where they cannot be divided: an agent spoke, or the step was small enough.
        """
        heard = any(node.heard is not None for node in self._nodes.values())
        least = 1 if heard else max(1, len(self._nodes) // _PARTS_WHILE_SILENT)
        company = max(least, len(nodes) // 2)
        if company >= len(nodes) or any(node.heard is not None for node in nodes.values()):
            return False
        for node in nodes.values():
            node.link, node.company = None, company
        return True

    def _look_at_nodes(self, now: float) -> None:
        for name, node in self._nodes.items():
            if node.link is None:
                continue
            if node.heard is not None and now - node.heard > self._settings.silent_s:
                self._lose(name, node, f"no word of the agent for {now - node.heard:.0f} s", now)
            elif node.heard is None and not node.starting(now):
                self._lose(name, node, f"the agent did not say a word within {_FIRST_WORD_S:.0f} s", now)

    def _lose(self, name: str, node: _Node, why: str, now: float) -> None:
        """Give an agent up; another will be started, each time after a longer pause."""
        if node.link is None:
            return
        if now - node.link.started > _LIVED_S and node.heard is not None:
            node.failures = 0
        if self._told_started:
            if not node.lost:
                self._events.append(("agent_lost", {"node": name, "reason": why}))
            node.lost = True
        elif node.failures >= 1 and not any(other.heard is not None for other in self._nodes.values()):
            self._unavailable(why)
        if not node.link.over:  # should it wake up again
            node.link.write(encode_command(Command("quit", nodes=(name,))))
        node.link = None
        node.heard = None
        node.retry_at = now + (min(_LONGEST_PAUSE_S, 2.0**node.failures) if node.failures else 0.0)
        node.failures += 1

    def _start_lost(self, now: float) -> None:
        due = [
            name
            for name, node in self._nodes.items()
            if node.link is None and now >= node.retry_at and not node.slurm_says
        ]
        divided = [name for name in due if self._nodes[name].company is not None]
        together = [name for name in due if self._nodes[name].company is None]
        if together and (len(together) == len(self._nodes) or len(together) > 4 * _STARTS_AT_ONCE):
            self._start_link(together)  # the whole step went
            together = []
        starting = {node.link for node in self._nodes.values() if node.starting(now)}
        parts = [[name] for name in together] + self._parts(divided)
        for part in parts[: max(0, _STARTS_AT_ONCE - len(starting))]:
            self._start_link(part)

    def _parts(self, names: Sequence[str]) -> list[list[str]]:
        """Nodes of steps that were refused, those of the largest first, in steps that are smaller."""
        of_size: dict[int, list[str]] = {}
        for name in names:
            of_size.setdefault(self._nodes[name].company or 1, []).append(name)
        return [
            together[at : at + size]
            for size, together in sorted(of_size.items(), reverse=True)
            for at in range(0, len(together), size)
        ]

    def _start_link(self, nodes: Sequence[str]) -> None:
        if not nodes or self._over.is_set():
            return
        number = next(self._link_numbers)
        name = f"{STEP_PREFIX}{self.generation}" + (f"-{number}" if number > 1 else "")
        now = time.monotonic()
        try:
            command, env = self._command(nodes, name)
            link = AgentLink(command, env, nodes, name, self._on_line)
        except OSError as error:
            self._unavailable(f"{error.filename or 'srun'}: {error.strerror}")
            for name in nodes:
                node = self._nodes[name]
                node.failures += 1
                node.retry_at = now + min(_LONGEST_PAUSE_S, 2.0**node.failures)
            return
        self._links.append(link)
        for node_name in nodes:
            self._nodes[node_name].link, self._nodes[node_name].heard = link, None
        if not self._on_slurm:
            with contextlib.suppress(OSError, ZslurmError):
                self._record_local(link)

    def _command(self, nodes: Sequence[str], name: str) -> tuple[list[str], dict[str, str]]:
        # Agents before these have seen how an attempt began; the first of all see it themselves.
        watched = self.attempt if self._told_started or self.attempt == self._adopted else 0
        agent = [*self._program, str(self._run.path), f"--generation={self.generation}", f"--attempt={watched}"]
        own = {"PYTHONSAFEPATH": "1", BATCH_NODE: self._environ.get("SLURMD_NODENAME", "")}
        if not self._on_slurm:
            return agent, self._environ | own
        return agent_step(self._spec, nodes, name) + agent, step_environment(self._environ) | own

    def _end_link(self, link: AgentLink) -> None:
        """In a thread of its own: Slurm may take its time."""
        if link in self._links:
            self._links.remove(link)

        def end() -> None:
            link.close_input()
            ended = link.wait(_BEAT_S)
            if self._on_slurm and (link.spoke or not ended):
                # An srun that has given up leaves its agents behind, and the controller may be away.
                gone = self._kill_steps([link.name])
                if not ended:
                    link.kill()
                while not gone and not self._over.wait(_AGAIN_S):
                    gone = self._kill_steps([link.name])
            elif not ended:
                link.kill()

        self._in_thread("end", end)

    # --- Slurm, which may be slow or away: each of these runs in a thread of its own ------------------------

    def _client(self) -> SlurmClient:
        return SlurmClient(self._environ, timeout_s=10.0, retries=Retries(attempts=2))

    def _kill_steps(self, names: Sequence[str]) -> bool:
        """Have Slurm end these steps; returns false where it did not answer."""
        try:
            for name in names:
                self._client().kill_step(self._job_id, name)
        except SlurmUnavailable:
            return False
        except ZslurmError:
            return True
        return True

    def _end_older(self) -> None:
        """End the agents of earlier supervisors, as soon as Slurm answers."""
        while not self._over.is_set():
            try:
                client = self._client()
                own = f"{STEP_PREFIX}{self.generation}"
                names = set(client.steps(self._job_id).values())
                for name in names:
                    if name.startswith(STEP_PREFIX) and not name.startswith(own):
                        client.kill_step(self._job_id, name)
                return
            except ZslurmError:
                self._over.wait(_AGAIN_S)

    def _ask_slurm(self) -> None:
        """What Slurm calls the silent nodes."""
        silent: dict[str, float] = {}
        try:
            nodes = {node.name: node for node in self._client().nodes()}
            with self._lock:
                silent = self._silent_nodes(time.monotonic())
                for name in silent:
                    known = nodes.get(name)
                    self._nodes[name].slurm_says = "" if known is None else _in_trouble(known)
                    self._nodes[name].is_down = known is not None and known.state in _DOWN
        except ZslurmError:
            pass
        finally:
            # Ever more rarely: a node may be away for days.
            self._over.wait(min(_LONGEST_PAUSE_S, max(_SLURM_SAYS_S, min(silent.values(), default=0.0) / 10)))
            self._asking_slurm.clear()

    # --- the local agent --------------------------------------------------------------------------------------

    @property
    def _record(self) -> Path:
        return self._run.path / "agent.json"

    def _record_local(self, link: AgentLink) -> None:
        """End the agent of an earlier supervisor, and write down which one is ours."""
        old = ProcessRecord.read(self._record)
        if old is not None and old.alive and old.pid != link.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(old.pid, 9)
        ProcessRecord.of(link.pid).write(self._record)


_DOWN = ("down", "error", "fail", "failing")


def _in_trouble(node: Node) -> str:
    """Slurm's word for a node that is not well; empty for one that is, and where Slurm does not know.

    A controller that was started anew calls every node `unknown`, and not responding, until the node registers.
    """
    if node.state == "unknown":
        return ""
    flags = sorted(node.flags & {"not_responding", "fail"})
    if node.state not in _DOWN and not flags:
        return ""
    return "Slurm says " + " ".join([node.state, *flags]).replace("_", " ")


def agent_step(spec: RunSpec, nodes: Sequence[str], name: str) -> list[str]:
    """srun for one agent on each of these nodes, beside whatever runs there."""
    command = [
        "srun",
        f"--job-name={name}",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mem=0",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--cpu-bind=none",
        f"--nodelist={compress(nodes)}",
    ]
    cluster = spec.cluster
    if cluster.gpus_per_node:
        # To look at them; where ConstrainDevices=yes a step sees only its own.
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        command += [f"--gpus-per-node={kind}{cluster.gpus_per_node}", "--gpu-bind=none"]
    return command

"""The supervisor's side of the agents: their heartbeat, their commands, and what they report.

On Slurm the agents are one step next to the training, `srun --overlap --no-kill`, whose standard input and output
are the only connection: no port, no file. Elsewhere the agent is a child process. The agents of a supervisor are a
generation: before they start it takes the run's lease in their name, and renews it (run/supervisor_lease.py), so
that agents which no pipe reaches any more know whether they were replaced. Its successor starts its own and ends
the older ones.

    agents = Agents(settings, event)
    agents.start(spec, run, job_id, nodes, environ)
    while ...:
        agents.attempt = 3
        for event in agents.news():
            step(state, event)
    agents.stop()

Nothing here raises into the supervisor, and nothing waits for Slurm in its thread. Five kinds of threads do the
work: one sends the heartbeat every second, whatever the others wait for; one renews the lease; one keeps the
agents alive (keeper.py); one asks about a silent node (inquiry.py); two for each link read (link.py). If no agent
can be started the supervisor continues without, and one event records it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from zslurm.aegis.core.messages import AskAbout, CoreEvent, ReportReceived
from zslurm.aegis.protocol import (
    AgentReport,
    Answer,
    Command,
    CommandName,
    Heartbeat,
    ReportReader,
    Unreadable,
    encode_command,
)
from zslurm.aegis.supervisor.agents.answers import AgentAnswers
from zslurm.aegis.supervisor.agents.inquiry import Inquiry
from zslurm.aegis.supervisor.agents.keeper import AgentKeeper
from zslurm.aegis.supervisor.agents.link import AgentLink
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.aegis.supervisor.agents.step import AGENT, AgentLauncher
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.config.aegis import AegisSection
from zslurm.config.spec import RunSpec
from zslurm.core.pauses import Pauses
from zslurm.run import supervisor_lease
from zslurm.run.events import AgentReportsIgnored, AgentRestarted, AgentsUnavailable, LeaseLost
from zslurm.run.events.event import Event, only_known
from zslurm.run.run_dir import RunDir

_HEARTBEAT_S = 1.0
# A pipe takes a line at once, unless srun has read nothing for many minutes.
_WRITE_S = 0.5
_KEPT_REPORTS = 50_000


class Agents:
    """The agents of one supervisor.

    Attributes:
        attempt: the attempt that the heartbeat names; the supervisor sets it.
        generation: of this supervisor.
        liveness: which agents respond, and what is known of nodes whose agents do not.
    """

    def __init__(
        self,
        settings: AegisSection,
        record: Callable[[Event], None],
        program: Sequence[str] = AGENT,
        pauses: Pauses | None = None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            settings: of the run.
            record: records what became of the agents; called only in the thread that calls `news`.
            program: the command that starts an agent; the run's directory and `--generation` follow.
            pauses: of this process; the heartbeat ticks.
        """
        self.attempt = 0
        self.generation = f"{int(time.time()):x}-{secrets.token_hex(3)}"
        self.liveness = Liveness(settings.heartbeat_timeout_s)
        self._pauses = Pauses() if pauses is None else pauses
        self._settings, self._write, self._program = settings, record, tuple(program)
        self._lock = self.liveness.lock
        self._answers = AgentAnswers(self._lock)
        self._news: deque[CoreEvent] = deque()
        self._reports_kept = 0
        self._events: deque[Event] = deque()
        self._readers: WeakKeyDictionary[AgentLink, ReportReader] = WeakKeyDictionary()
        self._unreadable: Counter[tuple[str, bool]] = Counter()
        self._over = threading.Event()
        self._inquiry: Inquiry | None = None
        self._helper_of: dict[str, str] = {}

    # --- start and end --------------------------------------------------------------------------------------

    def start(
        self, spec: RunSpec, run: RunDir, job_id: str, nodes: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """Start an agent on each node, in the background; end the agents of an earlier supervisor of this job.

        If an earlier supervisor's attempt still runs, set `attempt` before.

        Args:
            spec: the run.
            run: its directory.
            job_id: the job that this process runs in.
            nodes: all nodes of the job, spares too.
            environ: the environment of the job.
        """
        self._run = run
        self._launcher = AgentLauncher(
            spec, run, job_id, dict(environ), self.generation, self._program, self._over, self._helper_of
        )
        self._keeper = AgentKeeper(
            self._settings,
            self.liveness,
            self._launcher,
            pauses=self._pauses,
            present_attempt=lambda: self.attempt,
            on_line=self._on_line,
            record=self._record,
            tell=self._tell,
            in_thread=self._in_thread,
        )
        self.liveness.begin(nodes)
        self._in_thread("beat", self._beat)
        self._in_thread("keep", self._keep)
        if self._launcher.on_slurm:
            self._inquiry = Inquiry(nodes, self._launcher.client, self._ask_about, self._tell, self._over)
            if self._settings.ask_after_s > 0:
                self._in_thread("addresses", self._inquiry.find_addresses)
            self._in_thread("renew", self._renew)
            self._in_thread("end-older", lambda: self._launcher.end_older(job_id))

    def add(self, nodes: Sequence[str], helper: str, *, adopted: bool = False) -> None:
        """Have an agent on each of these nodes as well, which belong to a helper job.

        If it is `adopted`, the agents that an earlier supervisor has started there are ended.
        """
        self._helper_of |= dict.fromkeys(nodes, helper)
        if adopted:
            self._in_thread("end-older", lambda: self._launcher.end_older(helper))
        self.liveness.add(nodes)
        if self._inquiry is not None:
            self._inquiry.add(nodes)

    def _record(self, event: Event) -> None:
        """Keep an event for the next call of `news`, whichever thread this is."""
        with self._lock:
            self._events.append(event)

    def _tell(self, event: CoreEvent) -> None:
        """Keep what is new for the core for the next call of `news`, whichever thread this is."""
        with self._lock:
            self._news.append(event)

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        """Do something in a separate thread. A mistake in it is recorded, and costs the supervisor nothing."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._record(AgentsUnavailable(reason=f"{name}: {reason_of(error)}"))

        threading.Thread(target=guarded, daemon=True, name=f"agents-{name}").start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Have the agents quit, and end their steps; wait no longer than this."""
        deadline = time.monotonic() + timeout_s
        self.send(Command("quit"))
        self._over.set()
        with self._lock:
            links, self.liveness.links = self.liveness.links, []
        for link in links:
            link.close_input()
        open_links = [link for link in links if not link.wait(max(0.1, min(5.0, deadline - time.monotonic())))]
        if open_links and self._launcher.on_slurm:
            names = [link.name for link in open_links]
            killer = threading.Thread(target=self._launcher.kill_steps, args=(names,), daemon=True)
            killer.start()
            killer.join(max(0.1, deadline - time.monotonic()))
        for link in open_links:
            link.kill()
        if not self._launcher.on_slurm:
            self._launcher.local_record.unlink(missing_ok=True)

    # --- what comes -----------------------------------------------------------------------------------------

    def news(self) -> list[CoreEvent]:
        """Return what the agents and Slurm reported since the last call, oldest first; answers to `ask` too.

        Also records what became of the agents themselves.
        """
        with self._lock:
            news, events = list(self._news), list(self._events)
            self._news.clear()
            self._reports_kept = 0
            self._events.clear()
        for event in events:
            self._write(event)
        return news

    def ask_about(self, question: AskAbout) -> None:
        """Ask a silent node's slurmd and neighbours about it; the answer is among the `news`."""
        if self._inquiry is not None:
            self._inquiry.begin(question)

    def _on_line(self, link: AgentLink, line: bytes) -> None:
        """Take a line of output; called in the threads of the links."""
        with self._lock:
            reader = self._readers.setdefault(link, ReportReader(self._ignore))
        if (report := reader.read(line)) is None:
            return
        now, wall = time.monotonic(), time.time()
        with self._lock:
            nodes = self.liveness.nodes
            if not self._launcher.on_slurm and nodes:
                # The one agent need not call this machine what we call it.
                report = replace(report, stamp=replace(report.stamp, node=next(iter(nodes))))
            name = report.stamp.node
            node = nodes.get(name)
            link.has_reported = True
            if node is None or node.link is not link:
                return  # a forgotten node, or the agent that another one has replaced
            if node.heard is None and node.failures and node.lost:
                self._record(AgentRestarted(nodes=name))
            node.take_report(now)
            self._add_report(ReportReceived(report, now, wall))
            if isinstance(report, Answer):
                self._answers.take(name, report)
                return
            if isinstance(report, AgentReport) and report.event == "ended":
                why = "the agent ended: " + str(report.values.get("reason", "no reason"))
                self._keeper.mark_lost(name, node, why, now)

    def _add_report(self, report: ReportReceived) -> None:
        """Keep a report for the next `news`; of too many the oldest goes, and never what else is known."""
        if self._reports_kept == _KEPT_REPORTS:
            oldest = next(index for index, event in enumerate(self._news) if isinstance(event, ReportReceived))
            del self._news[oldest]
        else:
            self._reports_kept += 1
        self._news.append(report)

    def _ignore(self, node: str, error: Unreadable) -> None:
        """Record the first report of a node that cannot be read, then the 10th, the 100th and so on."""
        with self._lock:
            self._unreadable[node, error.is_damaged] += 1
            count = self._unreadable[node, error.is_damaged]
        if count == 10 ** (len(str(count)) - 1):
            damaged = error.is_damaged or None
            ignored = AgentReportsIgnored(node=node or None, count=count, damaged=damaged, reason=str(error))
            self._record(only_known(ignored))

    # --- what goes ------------------------------------------------------------------------------------------

    def send(self, command: Command) -> bool:
        """Give the agents a command; returns false if a link did not take it."""
        line = encode_command(command)
        taken = [link.write(line, _WRITE_S) for link in self.liveness.present_links()]
        return all(taken)

    @property
    def over(self) -> bool:
        """Return whether the supervisor has ended its agents."""
        return self._over.is_set()

    def ask(
        self,
        do: CommandName,
        nodes: Sequence[str] = (),
        *,
        timeout_s: float,
        attempt: int | None = None,
        kill: bool = True,
        rank: int = -1,
    ) -> dict[str, Answer]:
        """Give these nodes' agents a command, and wait for their answers.

        Reports that come while it waits are kept for `news`.

        Args:
            do: the command.
            nodes: those to ask; default: all.
            timeout_s: seconds to wait; an agent that has not answered then is missing in the result.
            attempt: the attempt that it is about; default: the present one.
            kill: of `clean_up`.
            rank: of `end_rank`.
        """
        with self._lock:
            all_nodes = set(self.liveness.nodes)
        asked = set(nodes or all_nodes) & all_nodes
        named = () if asked == all_nodes else tuple(sorted(asked))
        about = self.attempt if attempt is None else attempt
        return self._ask(Command(do, attempt=about, kill=kill, nodes=named, rank=rank), asked, timeout_s)

    def _ask(self, command: Command, asked: Set[str], timeout_s: float) -> dict[str, Answer]:
        with self._answers.collected() as number:
            if asked:
                self.send(replace(command, id=number))
            return self._answers.wait(number, asked, timeout_s)

    def _ask_about(self, command: Command, witnesses: Sequence[str], timeout_s: float) -> dict[str, Answer]:
        """Give agents a command, and wait for the answers of some of them."""
        return self._ask(command, set(witnesses), timeout_s)

    # --- threads --------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send the heartbeat every second, whatever else waits."""
        while not self._over.is_set():
            self._pauses.tick()
            line = encode_command(Heartbeat(time.time(), self.attempt, self.generation))
            for link in self.liveness.present_links():
                link.write(line)
            self._over.wait(_HEARTBEAT_S)

    def _keep(self) -> None:
        if (reason := self._launcher.blocking_reason()) is not None:
            self._keeper.unavailable(reason)
            return
        if self._launcher.on_slurm:  # the first agent must find its own generation in the file
            with contextlib.suppress(OSError):  # `_renew` tries again
                supervisor_lease.take(self._run, self.generation)
        self._keeper.run()

    def _renew(self) -> None:
        """Renew the lease; the run directory may hang, which must not delay the heartbeat."""
        reported = False
        while not self._over.wait(supervisor_lease.RENEW_S):
            with contextlib.suppress(OSError):
                lease = supervisor_lease.read(self._run)
                if lease is None or (lease.generation is None and lease.is_own):
                    supervisor_lease.take(self._run, self.generation)
                elif not supervisor_lease.renew(self._run, self.generation) and not reported:
                    reported = True
                    self._record(only_known(LeaseLost(generation=lease.generation)))

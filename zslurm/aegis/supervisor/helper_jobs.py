"""The helper jobs of a start of the job: they are submitted, watched, and ended with it.

What a helper job is for, and when one is asked for, is in core/helpers.py; what runs in it, in job/helper.py.
Agents and warm processes on its nodes are started by this supervisor, in steps of the helper job (`srun --jobid`),
as on the other nodes. An event precedes each submission: the next supervisor finds the job by its script.
"""

from __future__ import annotations

import contextlib
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.core.messages import CoreEvent, HelperAsked, HelperEnded, HelperStarted
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.core.errors import NotFound, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.job.helper import software
from zslurm.run.events import HelperJoined, HelperOver, HelperQueued, HelperRefused, HelperRequested
from zslurm.run.events.event import Event, only_known, select
from zslurm.slurm.client import SlurmClient, SubmissionEnded
from zslurm.slurm.helper_script import helper_script
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.run_command import Retries
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import read_jsonl

_AGAIN_S = 600.0
"""Seconds after which a helper job is asked for again that was refused."""
_SHORTEST_S = 120.0
"""Seconds that a helper job should have left before the run's time limit."""
_ENDS = (JobState.COMPLETING, JobState.REVOKED)
"""States of a job whose processes are being ended."""
_LOOK_S, _ASK_SLURM_S = 0.5, 2.0
"""Seconds between two looks for what helper jobs report, and between two questions to Slurm about them."""


HelperOf = Callable[[], Mapping[str, str]]
"""Returns the helper job of each node that belongs to one."""


@dataclass
class _Helper:
    """One helper job.

    Attributes:
        number: nodes that it asks for.
        asked_at: when it was submitted (UNIX seconds).
        nodes: its nodes; none before it has reported them.
        over: why it is over; None while it is not.
    """

    number: int
    asked_at: float
    nodes: tuple[str, ...] = ()
    over: str | None = None


class HelperJobs:
    """Submits helper jobs, and knows which of their nodes belong to which."""

    def __init__(self, job: Job, nodes: Nodes) -> None:
        """Find those that an earlier supervisor has left: of this start of the job they stay, others are ended."""
        self._job, self._nodes = job, nodes
        self._agents: Agents | None = None
        self._client = SlurmClient(job.environ, timeout_s=10.0, retries=Retries(attempts=2))
        self._helpers: dict[str, _Helper] = {}
        self._dismissed: set[str] = set()
        self._news: queue.SimpleQueue[tuple[Event | None, CoreEvent | None]] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watcher: threading.Thread | None = None
        if job.on_slurm:
            self._adopt()

    def use(self, agents: Agents | None) -> None:
        """Have these agents on the nodes of helper jobs."""
        self._agents = agents
        for name, helper in self._helpers.items():
            if agents is not None and helper.nodes and helper.over is None:
                agents.add(helper.nodes, name)

    # --- what the core asks for ---------------------------------------------------------------------------------

    def ask(self, number: int) -> Iterator[CoreEvent]:
        """Submit a helper job in the background; the first event of it is recorded now."""
        scripts = self._job.run.helpers
        try:
            scripts.mkdir(exist_ok=True)
            script = scripts / f"{len(list(scripts.glob('*.sh'))) + 1:04d}-{self._job.job_id}.sh"
            write_atomically(script, self._script(number))
        except (OSError, ZslurmError) as error:
            yield from self._refused(str(error))
            return
        self._job.record(HelperRequested(number=number, script=str(script), restart=self._job.restart))
        threading.Thread(target=self._submit, args=(number, script), name="helper", daemon=True).start()

    def dismiss(self, helper: str) -> None:
        """End a helper job, once; that it is over is reported later."""
        if helper in self._dismissed:  # the core asks again until it hears that the job is over
            return
        self._dismissed.add(helper)
        threading.Thread(target=self._cancel, args=(helper,), name="dismiss", daemon=True).start()

    def begin_attempt(self) -> Iterator[CoreEvent]:
        """Yield what an attempt that begins, or is adopted, must know."""
        with self._lock:
            for name, helper in self._helpers.items():
                if helper.over is not None:
                    yield HelperEnded(name, helper.nodes, time.monotonic())
                elif helper.nodes:
                    yield HelperStarted(name, helper.nodes)
                else:
                    yield HelperAsked(waits=True)

    def events(self) -> Iterable[CoreEvent]:
        """Record what is new of helper jobs, and yield it for the core."""
        while not self._news.empty():
            recorded, told = self._news.get()
            if recorded is not None:
                self._job.record(recorded)
            if self._agents is not None and isinstance(told, HelperStarted):
                self._agents.add(told.nodes, told.helper)
            elif self._agents is not None and isinstance(told, HelperEnded):
                self._agents.liveness.forget(told.nodes)
            if told is not None:
                yield told

    def close(self) -> None:
        """End every helper job: the run is over in this start of the job."""
        self._closed.set()
        for _ in self.events():
            pass
        with self._lock:
            to_end = {name: helper for name, helper in self._helpers.items() if helper.over is None}
        for name, helper in to_end.items():
            self._cancel(name)
            helper.over = "the run is over in its job, or is requeued"
            self._job.record(HelperOver(helper=name, reason=helper.over))

    # --- the jobs -----------------------------------------------------------------------------------------------

    def _script(self, number: int) -> str:
        """Return the script of a helper job.

        Raises:
            ZslurmError: the run's job ends too soon.
            OSError: the script of the run cannot be read.
        """
        job, spec, left_s = self._job, self._job.spec, self._nodes.job_left_s()
        if left_s is not None and left_s < _SHORTEST_S:
            raise ZslurmError(f"the run's job ends in {left_s:.0f} s")
        with self._lock:
            used = [node for helper in self._helpers.values() for node in helper.nodes]
        avoided = [*self._nodes.every, *used, *job.excluded(), *expand(spec.slurm.exclude or "")]
        command = [sys.executable, "-u", "-m", "zslurm.job.helper", str(job.run.path), job.job_id, software()]
        return helper_script(
            job.run.script.read_text(encoding="utf-8"),
            name=f"{spec.slurm.job_name or spec.run.name}-helper",
            nodes=number,
            exclude=compress(dict.fromkeys(avoided)),
            output=str(job.run.logs / "helper-%j.log"),
            left_s=left_s,
            now=time.time(),
            command=shlex.join(command),
            python_path=job.environ.get("PYTHONPATH", ""),
        )

    def _submit(self, number: int, script: Path) -> None:
        """Submit, in a thread."""
        try:
            name = self._client.submit(script)
        except ZslurmError as error:
            for told in self._refused(str(error)):
                self._news.put((None, told))
            return
        with self._lock:
            self._helpers[name] = _Helper(number, time.time())
        if self._closed.is_set():  # the run has ended meanwhile
            self._cancel(name)
            return
        self._news.put((self._queued(name, number, script), HelperAsked(waits=True)))
        self._watch()

    def _queued(self, name: str, number: int, script: Path) -> HelperQueued:
        expected: float | None = None
        with contextlib.suppress(ZslurmError):
            record = self._client.queue([name]).get(name)
            expected = record.start_time.timestamp() if record is not None and record.start_time else None
        queued = HelperQueued(
            helper=name, number=number, script=str(script), restart=self._job.restart, expected_start=expected
        )
        return only_known(queued)

    def _refused(self, reason: str) -> Iterator[CoreEvent]:
        self._news.put((HelperRefused(reason=reason), None))
        yield HelperAsked(waits=False, again_at=time.monotonic() + _AGAIN_S)

    def _cancel(self, name: str) -> None:
        try:
            self._client.cancel(name)
        except ZslurmError:  # the core asks again; without a supervisor it ends by itself
            self._dismissed.discard(name)

    def _watch(self) -> None:
        if self._watcher is None or not self._watcher.is_alive():
            self._watcher = threading.Thread(target=self._watch_all, name="helpers", daemon=True)
            self._watcher.start()

    def _watch_all(self) -> None:
        asked = 0.0
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                present = {name: helper for name, helper in self._helpers.items() if helper.over is None}
            if not present:
                return
            for name, helper in present.items():
                if not helper.nodes:
                    self._look_for_report(name, helper)
            if time.monotonic() - asked >= _ASK_SLURM_S:
                asked = time.monotonic()
                self._ask_slurm(present)

    def _look_for_report(self, name: str, helper: _Helper) -> None:
        path = self._job.run.helper_report(name)
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # an NFS client asks its server again
            report = read_json(path)
            if report is None:
                return
            if report.get("reason"):
                self._end(name, helper, str(report["reason"]))
                return
            nodes = tuple(map(str, report["nodes"]))
            with self._lock:
                helper.nodes = nodes
            waited_s = round(time.time() - helper.asked_at, 1)
            joined = HelperJoined(helper=name, nodes=compress(nodes), waited_s=waited_s)
            self._news.put((joined, HelperStarted(name, nodes)))

    def _ask_slurm(self, present: dict[str, _Helper]) -> None:
        try:
            records = self._client.queue(list(present))
        except ZslurmError:
            return
        for name, helper in present.items():
            record = records.get(name)
            if helper.over is None and (record is None or record.state in _ENDS or record.state.is_over):
                what = "Slurm does not know it any more" if record is None else f"Slurm calls it {record.state}"
                self._end(name, helper, what)

    def _end(self, name: str, helper: _Helper, reason: str) -> None:
        helper.over = reason
        self._cancel(name)
        ended = HelperEnded(name, helper.nodes, time.monotonic())
        self._news.put((HelperOver(helper=name, reason=reason), ended))
        if not helper.nodes:
            self._news.put((None, HelperAsked(waits=False, again_at=time.monotonic() + _AGAIN_S)))

    # --- another supervisor -------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over the helper jobs of an earlier supervisor of this start, and end those of earlier starts."""
        kinds = (HelperRequested, HelperQueued, HelperJoined, HelperOver)
        own_start: dict[str, bool] = {}
        unknown: dict[str, HelperRequested] = {}
        for event in select(read_jsonl(self._job.run.events), *kinds):
            if isinstance(event, HelperRequested):
                unknown[event.script] = event
            elif isinstance(event, HelperQueued):
                unknown.pop(event.script, None)
                own_start[event.helper] = (event.job_id, event.restart) == (self._job.job_id, self._job.restart)
                self._helpers[event.helper] = _Helper(event.number, event.time)
            elif isinstance(event, HelperJoined) and event.helper in self._helpers:
                self._helpers[event.helper].nodes = tuple(expand(event.node_list))
            elif isinstance(event, HelperOver) and event.helper in self._helpers:
                self._helpers[event.helper].over = event.reason or "it is over"
        for script, event in unknown.items():
            with contextlib.suppress(ZslurmError):
                try:
                    name = self._client.job_of_script(script)
                except SubmissionEnded:
                    name = None
                if name is not None:
                    own_start[name] = (event.job_id, event.restart) == (self._job.job_id, self._job.restart)
                    self._helpers[name] = _Helper(event.number, event.time)
                    self._job.record(self._queued(name, event.number, Path(script)))
        for name, is_own in own_start.items():
            helper = self._helpers[name]
            if not is_own and helper.over is None:
                with contextlib.suppress(NotFound):
                    self._cancel(name)
                self._job.record(HelperOver(helper=name, reason="the run's job has started again"))
            if not is_own:
                del self._helpers[name]
        if any(helper.over is None for helper in self._helpers.values()):
            self._watch()

    def job_of(self) -> dict[str, str]:
        """Return the helper job of each node that belongs to one."""
        with self._lock:
            return {node: name for name, helper in self._helpers.items() for node in helper.nodes}


def by_job(nodes: Sequence[str], job_of: Mapping[str, str]) -> list[tuple[str | None, list[str]]]:
    """Divide nodes by the helper job that they belong to; None stands for the run's own job."""
    parts: dict[str | None, list[str]] = {}
    for node in nodes:
        parts.setdefault(job_of.get(node), []).append(node)
    return list(parts.items())

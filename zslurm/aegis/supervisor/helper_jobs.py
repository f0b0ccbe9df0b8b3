"""The helper jobs of a start of the job: they are submitted, watched, and ended with it.

What a helper job is for, and when one is asked for, is in core/helpers.py; what runs in it, in job/helper.py.
Agents and warm processes on its nodes are started by this supervisor, in steps of the helper job (`srun --jobid`),
as on the other nodes.

    requested -> submitted -> queued -> started -> over
                      no answer -> looked for by its script -> queued, or not there

An event precedes each submission, and one thread does all that Slurm is asked for. So a job whose submission got
no answer, from this supervisor or an earlier one, is found by its script before another one is submitted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.core.messages import AskForHelper, CoreEvent, HelperAsked, HelperEnded, HelperStarted
from zslurm.aegis.core.policy.shrinking import expected_helper_wait_s
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.core.errors import NotFound, SlurmUnavailable, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.job.helper import software
from zslurm.run.events import HelperJoined, HelperOver, HelperQueued, HelperRefused, HelperRequested
from zslurm.run.events.event import Event, only_known, select
from zslurm.slurm.client import SlurmClient, SubmissionEnded
from zslurm.slurm.helper_script import helper_script
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.reasons import explain
from zslurm.slurm.run_command import Retries
from zslurm.slurm.states import JobState
from zslurm.train.jsonl import read_jsonl

_LOG = logging.getLogger(__name__)
_AGAIN_S, _AGAIN_UNANSWERED_S = 600.0, 60.0
"""Seconds after which a helper job is asked for again: one that was refused, and one that got no answer."""
_SHORTEST_S = 120.0
"""Seconds that a helper job should have left before the run's time limit."""
_ENDS = (JobState.COMPLETING, JobState.REVOKED)
"""States of a job whose processes are being ended."""
_LOOK_S, _ASK_SLURM_S = 0.5, 2.0
"""Seconds between two looks for what helper jobs report, and between two questions to Slurm about them."""
_MOST_LOOKS = 7
"""Times that Slurm shows no job of a submission that got no answer, before there is none: two minutes, as the
pause between two looks doubles each time."""
_ESTIMATE_S = 2.0
"""Seconds that Slurm gets to estimate when a helper job would start."""
_LEAVE_S = 30.0
"""Seconds that Slurm gets at the end to cancel helper jobs. What is left then ends by itself when it starts."""
_NO_JOB = "its submission got no answer, and Slurm shows no job of it"
_USUAL_REASONS = frozenset(["", "Priority", "Resources", "BeginTime", "SchedDefer", "Prolog", "Cleaning"])
"""Why a helper job may wait that will start some time."""


HelperOf = Callable[[], Mapping[str, str]]
"""Returns the helper job of each node that belongs to one."""
HelperWait = Callable[[int, float | None], float | None]
"""Returns what `HelperJobs.expected_wait_s` does."""


@dataclass
class _Helper:
    """One helper job, from its request on. After that only the thread `_work` changes it.

    Attributes:
        number: nodes that it asks for.
        script: the path of its script, by which Slurm finds it.
        asked_at: when it was submitted (UNIX seconds).
        is_own: it was requested by this start of the run's job.
        is_sent: its submission has begun, perhaps by an earlier supervisor.
        name: Slurm's; None as long as none is known.
        nodes: its nodes; none before it has reported them.
        over: why it is over; None while it is not.
        to_end: why it is to be cancelled; empty if it is not.
        is_cancelled: Slurm has taken the cancellation.
        reason: why it waits, by Slurm.
        unanswered: times that it was looked for in vain.
        look_at: when it is looked for again (monotonic seconds).
    """

    number: int
    script: str
    asked_at: float
    is_own: bool = True
    is_sent: bool = False
    name: str | None = None
    nodes: tuple[str, ...] = ()
    over: str | None = None
    to_end: str = ""
    is_cancelled: bool = False
    reason: str = ""
    unanswered: int = 0
    look_at: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether it may start yet, by all that is known."""
        return self.over is None and not self.nodes and (self.name is not None or not self.unanswered)


class HelperJobs:
    """Submits helper jobs, and knows which of their nodes belong to which."""

    def __init__(self, job: Job, nodes: Nodes) -> None:
        """Find those that an earlier supervisor has left: of this start of the job they stay, others are ended."""
        self._job, self._nodes = job, nodes
        self._agents: Agents | None = None
        self._client = SlurmClient(job.environ, timeout_s=10.0, retries=Retries(attempts=2))
        self._helpers: list[_Helper] = []
        self._news: queue.SimpleQueue[tuple[Event | None, CoreEvent | None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._worker: threading.Thread | None = None
        if job.on_slurm:
            self._adopt()

    def use(self, agents: Agents | None) -> None:
        """Have these agents on the nodes of helper jobs, in place of those of an earlier supervisor."""
        self._agents = agents
        for helper in self._present():
            if agents is not None and helper.nodes and helper.name is not None:
                agents.add(helper.nodes, helper.name, adopted=True)

    # --- what the core asks for ---------------------------------------------------------------------------------

    def ask(self, wanted: AskForHelper) -> Iterator[CoreEvent]:
        """Submit a helper job in the background; the first event of it is recorded now."""
        scripts, number = self._job.run.helpers, wanted.nodes
        try:
            scripts.mkdir(exist_ok=True)
            script = scripts / f"{len(list(scripts.glob('*.sh'))) + 1:04d}-{self._job.job_id}.sh"
            write_atomically(script, self._script(wanted, self._nodes.job_left_s()))
        except (OSError, ZslurmError) as error:
            yield self._refused(str(error))
            return
        weighed = wanted.weighed
        requested = HelperRequested(
            number=number, script=str(script), restart=self._job.restart,
            lost_s=None if weighed is None else round(weighed.lost_s, 1),
            helper_wait_s=None if weighed is None else weighed.helper_wait_s,
            helper_lost_s=None if weighed is None else round(weighed.helper_lost_s or 0.0, 1),
        )  # fmt: skip
        self._job.record(only_known(requested))
        self._helpers.append(_Helper(number, str(script), time.time()))
        self._start_work()

    def expected_wait_s(self, number: int, left_s: float | None) -> float | None:
        """Return the seconds that a helper job would wait; None if there can be none, or that is not known.

        Ranks may wait for the answer, so Slurm is asked once, and not for long.

        Args:
            number: nodes that it asks for.
            left_s: seconds until the time limit of the run's job; None if it has none, or it is not known.
        """
        if number < 1 or not self._job.spec.may_ask_for_helpers:
            return None
        client = SlurmClient(self._job.environ, timeout_s=_ESTIMATE_S, retries=Retries(attempts=1))
        estimate_s: float | None = None
        try:
            estimate = client.estimate_start(self._script(AskForHelper(number), left_s))
            estimate_s = None if estimate is None else round(estimate.time.timestamp() - time.time(), 1)
        except SlurmUnavailable:
            pass
        except (OSError, ZslurmError):  # it is refused, or the run's job ends soon
            return None
        return expected_helper_wait_s(self._job.history(), estimate_s)

    def dismiss(self, name: str, reason: str) -> None:
        """End a helper job, once Slurm answers; that it is over is reported later."""
        for helper in self._present():
            if helper.name == name:
                helper.to_end = reason

    def begin_attempt(self) -> Iterator[CoreEvent]:
        """Yield what an attempt that begins, or is adopted, must know."""
        for helper in [helper for helper in self._helpers if helper.is_own]:
            if helper.over is not None and helper.name is not None:
                yield HelperEnded(helper.name, helper.nodes, time.monotonic())
            elif helper.nodes and helper.name is not None:
                yield HelperStarted(helper.name, helper.nodes)
            elif helper.waits:
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
        """End every helper job: the run is over in this start of the job. Slurm gets `_LEAVE_S` for that."""
        self._closed.set()
        if self._worker is not None:
            self._worker.join(_LEAVE_S + 1.0)
        for _ in self.events():
            pass
        for helper in self._present():
            which = f"helper job {helper.name}" if helper.name else f"the helper job of {helper.script}"
            _LOG.warning("%s may be in the queue: Slurm does not answer; it ends when it starts", which)

    def reopen(self) -> None:
        """Submit helper jobs again: the run's job could not be requeued, and the run stays in this start of it."""
        self._closed.clear()
        if self._present():
            self._start_work()

    def job_of(self) -> dict[str, str]:
        """Return the helper job of each node that belongs to one."""
        return {node: helper.name for helper in self._helpers if helper.name for node in helper.nodes}

    def _present(self) -> list[_Helper]:
        return [helper for helper in self._helpers if helper.over is None]

    def _script(self, wanted: AskForHelper, left_s: float | None) -> str:
        """Return the script of a helper job.

        Raises:
            ZslurmError: the run's job ends too soon.
            OSError: the script of the run cannot be read.
        """
        job, spec = self._job, self._job.spec
        if left_s is not None and left_s < _SHORTEST_S:
            raise ZslurmError(f"the run's job ends in {left_s:.0f} s")
        used = [node for helper in self._present() for node in helper.nodes]
        avoided = [
            *self._nodes.every, *used, *wanted.avoid, *job.excluded(), *expand(spec.slurm.exclude or ""),
        ]  # fmt: skip
        command = [sys.executable, "-u", "-m", "zslurm.job.helper", str(job.run.path), job.job_id, software()]
        return helper_script(
            job.run.script.read_text(encoding="utf-8"),
            name=f"{spec.slurm.job_name or spec.run.name}-helper",
            nodes=wanted.nodes,
            exclude=compress(dict.fromkeys(avoided)),
            output=str(job.run.logs / "helper-%j.log"),
            left_s=left_s,
            now=time.time(),
            command=shlex.join(command),
            python_path=job.environ.get("PYTHONPATH", ""),
        )

    def _refused(self, reason: str, again_s: float = _AGAIN_S) -> HelperAsked:
        """Record that there is no helper job as far as is known; return the event for the core."""
        self._news.put((only_known(HelperRefused(reason=reason)), None))
        return HelperAsked(waits=False, again_at=time.monotonic() + again_s)

    # --- the thread that asks Slurm -----------------------------------------------------------------------------

    def _start_work(self) -> None:
        if self._worker is None or not self._worker.is_alive():
            self._worker = threading.Thread(target=self._work, name="helpers", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        asked = 0.0
        while not self._closed.wait(_LOOK_S):
            for helper in self._present():
                if helper.name is None:
                    self._find_job(helper)
                elif helper.to_end:
                    self._end_unwanted(helper)
                elif not helper.nodes:
                    self._look_for_report(helper, helper.name)
            if time.monotonic() - asked >= _ASK_SLURM_S:
                asked = time.monotonic()
                self._ask_slurm()
        deadline = time.monotonic() + _LEAVE_S
        while self._leave() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _find_job(self, helper: _Helper) -> None:
        """Submit a helper job, or look for one of which it is not known whether it was."""
        if helper.is_sent:
            self._look_for_job(helper)
        elif self._may_submit(helper):
            self._submit(helper)

    def _may_submit(self, helper: _Helper) -> bool:
        """Return whether no earlier one waits, those included whose submissions got no answer."""
        for other in [other for other in self._present() if other.is_sent and other.name is None]:
            try:
                self._take_job(other, self._client.job_of_script(other.script))
            except SubmissionEnded:
                pass
            except ZslurmError as error:
                self._fail(helper, f"it is not known whether an earlier one waits: {error}", _AGAIN_UNANSWERED_S)
                return False
            if other.name is None:
                self._drop(other, _NO_JOB)
        if any(o.is_own and o.name is not None and not (o.nodes or o.to_end) for o in self._present()):
            self._drop(helper, "an earlier one waits")
        return helper.over is None

    def _submit(self, helper: _Helper) -> None:
        helper.is_sent = True
        try:
            name = self._client.submit(Path(helper.script))
        except SlurmUnavailable as error:
            _LOG.warning("a helper job was submitted, and it is not known whether it arrived: %s", error)
        except ZslurmError as error:
            self._fail(helper, str(error), _AGAIN_S)
        else:
            self._take_job(helper, name)

    def _fail(self, helper: _Helper, reason: str, again_s: float) -> None:
        """Take that there is no job of a request, and will be none; have the core ask again after some time."""
        self._drop(helper, reason)
        if helper.is_own:
            self._news.put((None, HelperAsked(waits=False, again_at=time.monotonic() + again_s)))

    def _drop(self, helper: _Helper, reason: str) -> None:
        """Take that there is no job of a request, and record it: the next supervisor does not look for one."""
        helper.over = reason
        self._news.put((only_known(HelperRefused(reason=reason, script=helper.script)), None))

    def _look_for_job(self, helper: _Helper) -> None:
        """Look for the job of a submission that got no answer; the controller may take it late."""
        if time.monotonic() < helper.look_at:
            return
        try:
            name = self._client.job_of_script(helper.script)
        except SubmissionEnded as error:
            self._fail(helper, str(error), _AGAIN_UNANSWERED_S)
            return
        except ZslurmError:
            helper.look_at = time.monotonic() + _ASK_SLURM_S
            return
        self._take_job(helper, name)
        if name is None:
            helper.look_at = time.monotonic() + _ASK_SLURM_S * 2.0**helper.unanswered
            helper.unanswered += 1
            if helper.unanswered == 1 and helper.is_own:
                self._news.put((None, self._refused(_NO_JOB, again_s=_AGAIN_UNANSWERED_S)))
            elif helper.unanswered == _MOST_LOOKS:
                self._drop(helper, _NO_JOB)

    def _take_job(self, helper: _Helper, name: str | None) -> None:
        """Take the job of a helper, if there is one."""
        if name is None:
            return
        helper.name = name
        record: JobRecord | None = None
        with contextlib.suppress(ZslurmError):
            record = self._client.queue([name]).get(name)
        waits = HelperAsked(waits=True) if helper.is_own else None
        self._news.put((self._queued(helper, record), waits))

    def _queued(self, helper: _Helper, record: JobRecord | None) -> HelperQueued:
        starts = record.start_time.timestamp() if record is not None and record.start_time is not None else None
        queued = HelperQueued(
            helper=helper.name or "", number=helper.number, script=helper.script, restart=self._job.restart,
            expected_start=starts, reason=explain(helper.reason) if helper.reason else None,
        )  # fmt: skip
        return only_known(queued)

    def _cancel(self, helper: _Helper) -> bool:
        """Cancel a helper job; return false if Slurm does not answer."""
        try:
            if helper.name is not None and not helper.is_cancelled:
                self._client.cancel(helper.name)
        except NotFound:
            pass
        except ZslurmError:
            return False
        helper.is_cancelled = True
        return True

    def _end_unwanted(self, helper: _Helper) -> None:
        """Cancel a helper job that the core does not want; report the end of one of an earlier start as well."""
        if self._cancel(helper) and not helper.is_own:
            helper.over = helper.to_end
            self._news.put((HelperOver(helper=helper.name or "", reason=helper.to_end), None))

    def _leave(self) -> bool:
        """End every helper job; return whether some are left, because Slurm does not answer."""
        for helper in self._present():
            if helper.name is None and helper.is_sent:
                try:
                    helper.name = self._client.job_of_script(helper.script)
                except SubmissionEnded:
                    pass
                except ZslurmError:
                    continue
            if self._cancel(helper):
                helper.over = helper.to_end or "the run is over in its job, or is requeued"
                if helper.name is not None:
                    self._news.put((HelperOver(helper=helper.name, reason=helper.over), None))
        return bool(self._present())

    def _look_for_report(self, helper: _Helper, name: str) -> None:
        path = self._job.run.helper_report(name)
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # an NFS client asks its server again
            report = read_json(path)
            if report is None:
                return
            if report.get("reason"):
                self._end(helper, name, str(report["reason"]))
                return
            helper.nodes = tuple(map(str, report["nodes"]))
            waited_s = round(time.time() - helper.asked_at, 1)
            joined = HelperJoined(helper=name, nodes=compress(helper.nodes), waited_s=waited_s)
            self._news.put((joined, HelperStarted(name, helper.nodes)))

    def _ask_slurm(self) -> None:
        """Take what Slurm reports of helper jobs: those that are over, and why others wait."""
        present = {helper.name: helper for helper in self._present() if helper.name is not None}
        if not present:
            return
        try:
            records = self._client.queue(list(present))
        except ZslurmError:
            return
        for name, helper in present.items():
            record = records.get(name)
            if record is None or record.state in _ENDS or record.state.is_over:
                what = "Slurm does not know it any more" if record is None else f"Slurm calls it {record.state}"
                self._end(helper, name, helper.to_end or what)
            elif not helper.nodes and record.reason not in _USUAL_REASONS | {helper.reason}:
                helper.reason = record.reason
                self._news.put((self._queued(helper, record), None))

    def _end(self, helper: _Helper, name: str, reason: str) -> None:
        helper.over = reason
        self._cancel(helper)
        over = only_known(HelperOver(helper=name, reason=reason))
        if not helper.is_own:
            self._news.put((over, None))
            return
        self._news.put((over, HelperEnded(name, helper.nodes, time.monotonic())))
        if not helper.nodes:
            self._news.put((None, HelperAsked(waits=False, again_at=time.monotonic() + _AGAIN_S)))

    # --- another supervisor -------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over the helper jobs of an earlier supervisor of this start, and end those of earlier starts."""
        kinds = (HelperRequested, HelperRefused, HelperQueued, HelperJoined, HelperOver)
        by_script: dict[str, _Helper] = {}
        by_name: dict[str, _Helper] = {}
        for event in select(read_jsonl(self._job.run.events), *kinds):
            match event:
                case HelperRequested():
                    is_own = (event.job_id, event.restart) == (self._job.job_id, self._job.restart)
                    helper = _Helper(event.number, event.script, event.time, is_own, is_sent=True)
                    helper.to_end = "" if is_own else "the run's job has started again"
                    by_script[event.script] = helper
                case HelperRefused() if event.script in by_script:
                    by_script[event.script].over = event.reason or "it was refused"
                case HelperQueued() if event.script in by_script:
                    by_name[event.helper] = by_script[event.script]
                    by_name[event.helper].name = event.helper
                case HelperJoined() if event.helper in by_name:
                    by_name[event.helper].nodes = tuple(expand(event.node_list))
                case HelperOver() if event.helper in by_name:
                    by_name[event.helper].over = event.reason or "it is over"
        self._helpers = [h for h in by_script.values() if h.over is None or (h.is_own and h.name is not None)]
        if self._present():
            self._start_work()


def by_job(nodes: Sequence[str], job_of: Mapping[str, str]) -> list[tuple[str | None, list[str]]]:
    """Divide nodes by the helper job that they belong to; None stands for the run's own job."""
    parts: dict[str | None, list[str]] = {}
    for node in nodes:
        parts.setdefault(job_of.get(node), []).append(node)
    return list(parts.items())

"""One attempt, from its start (or from where another supervisor left it) to its end.

Faults come from three sides: srun tells which rank ended, ranks record why, and the agents tell what they see on
the nodes. Each is written to the events as it is noticed. What they mean together is the policy's to say.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zslurm.aegis.detection.detector import Detector
from zslurm.aegis.detection.early_exits import early_exits
from zslurm.aegis.detection.rank_exits import (
    OF_RANKS,
    cancelled,
    faults_of_failure,
    late_faults,
    node_failed,
    rank_ends,
    words_of_srun,
)
from zslurm.aegis.fault_kinds import (
    EARLY_EXIT,
    NODE_DEAD,
    RANK_HANG,
    SENSOR_UNAVAILABLE,
    SLURM_CANCELLED,
    STRAGGLER,
)
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.policy.outcome import Cause, Verdict, judge, stopped_in_order
from zslurm.aegis.policy.policy import alarm
from zslurm.aegis.protocol import AgentReport
from zslurm.aegis.root_cause import roots_of, without_overcome
from zslurm.aegis.supervisor.agents import Agents
from zslurm.aegis.supervisor.attempt_starter import Running
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.teardown import clear, end_step, quiet_s
from zslurm.aegis.types import Alarm, Fault, Situation
from zslurm.core.errors import Exit
from zslurm.core.files import read_json
from zslurm.core.pauses import Pauses
from zslurm.job.stop_request import StopSender
from zslurm.run.metrics_tail import last_step_at, newest_rows
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.srun_output import TaskFailure, failed_nodes, task_failures
from zslurm.train.jsonl import read_jsonl

# Ranks that have only just been started have no store yet: the request is repeated until it has arrived.
_REPEAT_S = 2.0
_STACKS_S = 5.0
_LOOK_AGAIN_S = 5.0
"""Between two questions to Slurm about signals that the agents report."""

_ANSWER_BY_S = 60.0
"""So long Slurm gets to answer whether it preempts a job whose ranks have stopped unasked."""

_PAUSED_S = 30.0
"""So long no look takes by itself, questions to Slurm included."""
_SERIOUS = ("root", "cascade")
"""Roles of faults that can end an attempt. Of others there may be some for weeks: they must cost nothing."""

_JUDGE_S = 1.0
"""Between two judgements of the same faults: only time passes, and each looks into the run's files."""

_RECORDS_S = 5.0
"""How long the record of a rank that has ended may take to be seen on a shared file system."""

_ORDERLY = ("completed", "interrupted")
"""Every rank has left by itself: there is nothing to end, and no time to lose when Slurm ends the job."""

_LAST_LOOK_S = 0.5
"""How long the agents get to tell what their sensors saw when they were told that an attempt is over."""


@dataclass
class Watch:
    """Watches one attempt.

    Attributes:
        job: the start of the job that it belongs to.
        running: the attempt.
        signatures: what words mean.
        agents: the agents; None where the run has none.
        detector: makes faults of what the agents report.
        spares: healthy nodes of the job that the attempt does not use.
        told: what was said of sensors that cannot read, in this start of the job.
        faults: what was noticed so far, without what the run overcame.
    """

    job: Job
    running: Running
    signatures: Signatures
    agents: Agents | None
    detector: Detector
    spares: int = 0
    told: set[tuple[str, bool]] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    _failures: list[TaskFailure] = field(default_factory=list)
    _failed_at: float | None = None
    _asked_before: bool = False
    """An earlier supervisor has asked this attempt to stop."""
    _killed_before: bool = False
    """An earlier supervisor has ended the step."""
    overdue: bool = False
    """The ranks were asked to save and stop, and did not in time."""
    _repeat_at: float = 0.0
    _looked_for: int | None = None
    _signalled: bool = False
    _look_again_at: float = 0.0
    _alarm: Alarm = field(default_factory=lambda: Alarm(give_up=False))
    _judged: int = 0
    _judge_at: float = 0.0

    def __post_init__(self) -> None:
        self.history = self.job.history()
        self._pauses = Pauses(_PAUSED_S)
        self._sender = StopSender(self.attempt, self.running.process)

    @property
    def attempt(self) -> AttemptDir:
        return self.running.attempt

    def until_end(self) -> Verdict:
        """Wait for the end of the step, or bring it about; nothing of the attempt is left when this returns."""
        self._take_up()
        process, why = self.running.process, None
        root: Fault | None = None
        while process.poll() is None:
            process.reap()
            if (lost := self.job.presence.lost()) is not None:
                return self._abandon(lost)
            self._mind_pause()
            self._pass_signal_on()
            self._look()
            why, root = self._why_give_up()
            if why is not None:
                self._note_cancelled()
                self._give_up(why, root)
                break
            time.sleep(self.job.spec.aegis.poll_s)
        else:
            self._look()
            self._note_cancelled()
            if not process.left_exit_code:
                end_step(self.running, self.job.slurm_id)
        if (lost := self.job.presence.settled()) is not None:
            return self._abandon(lost)
        self._note_early_exits()
        verdict = self._verdict(why)
        if verdict.outcome == "interrupted" and not self.job.stop.asked:
            self._why_interrupted()
        if verdict.outcome not in _ORDERLY:
            self._clear()
            if self._note_early_exits():
                verdict = self._verdict(why)
            self.note(late_faults(self.attempt, self.faults, self._rank_nodes(), self.signatures))
            if not self._has_root(verdict):
                self.note(words_of_srun(self.attempt))
        process.reap()
        process.signal_group(signal.SIGKILL)  # what a rank started in the background
        shutil.rmtree(self.attempt.progress(self.job.environ), ignore_errors=True)  # left by killed ranks
        return verdict

    def _abandon(self, why: str) -> Verdict:
        """End an attempt whose run directory is lost: after a save elsewhere, where one is set."""
        process, job = self.running.process, self.job
        rescue = job.spec.checkpoint.rescue_dir
        job.event("run_dir_lost", attempt=self.attempt.number, reason=why, rescue_dir=rescue)
        deadline = time.monotonic() + (job.spec.aegis.save_s if rescue is not None else 0.0)
        repeat_at, asked = 0.0, False
        while time.monotonic() < deadline and process.record.alive:
            if time.monotonic() >= repeat_at:
                self._sender.send()
                asked = True
                repeat_at = time.monotonic() + _REPEAT_S
            process.reap()
            time.sleep(job.spec.aegis.poll_s)
        end_step(self.running, job.slurm_id)
        self._clear()
        process.reap()
        shutil.rmtree(self.attempt.progress(job.environ), ignore_errors=True)
        saved = "nothing was saved"
        if rescue is not None and asked:
            saved = f"the ranks were asked to save in {Path(rescue) / job.run.name}"
        return Verdict("failed", Exit.STOPPED, Cause(f"{why}; {saved}"))

    def situation(self, outcome: Verdict | None = None) -> Situation:
        """What the policy judges."""
        return Situation(
            time.time(),
            self.attempt.number,
            outcome.outcome if outcome is not None else None,
            tuple(sorted(self.faults, key=lambda fault: fault.time)),
            committed_step(self.job.run),
            self.job.stop.name,
            self.job.stop.requeued,
            preempted=self.job.stop.preempted,
            nodes=self.running.nodes,
            progressed_at=last_step_at(self.job.run.metrics, self.attempt.number),
        )

    def _take_up(self) -> None:
        """What an earlier supervisor has already noticed and recorded is not noticed again.

        It may have died between the two records of a failure, the end of the ranks and the fault.
        """
        spoken, explained = 0, True
        for row in read_jsonl(self.job.run.events):
            if row.get("attempt") != self.attempt.number:
                continue
            if row.get("event") == "ranks_ended":
                spoken, explained = spoken + 1, False
            elif row.get("event") == "signal":
                self._asked_before = True
            elif row.get("event") == "step_killed":
                self._killed_before = True
            elif row.get("event") == "fault_detected" and (fault := Fault.of_event(row)) is not None:
                self.faults.append(fault)
                explained = explained or fault.source in OF_RANKS
        self.detector.take_up(self.faults)
        self._failures = task_failures(_read(self.attempt))[:spoken]
        if self._failures and not explained and not self._stopped_in_order(self._failures[-1]):
            self.note(faults_of_failure(self.attempt, self._failures[-1], self._rank_nodes(), self.signatures))
        if any(not self._stopped_in_order(failure) for failure in self._failures):
            self._failed_at = time.monotonic()

    def _pass_signal_on(self) -> None:
        now = time.monotonic()
        self._sender.find()
        if not self.job.stop.asked or now < self._repeat_at:
            return
        stop = self.job.stop
        if stop.deadline is None:
            if stop.name is not None:
                self.job.event("signal", signal=stop.name, attempt=self.attempt.number)
            stop.deadline = now + self.job.spec.aegis.save_s
        self._sender.send()
        self._repeat_at = now + _REPEAT_S
        if stop.signum != self._looked_for:
            self._looked_for = stop.signum
            self.job.look_for_preemption()

    def _mind_pause(self) -> None:
        """Where we were stopped ourselves, the ranks were, too: no deadline of theirs runs meanwhile."""
        paused_s = self._pauses.tick()
        if paused_s and self.job.stop.deadline is not None:
            self.job.stop.deadline += paused_s
        if paused_s and self._failed_at is not None:
            self._failed_at += paused_s

    def _look_once_signalled(self) -> None:
        """Ask Slurm, once for the signals of all nodes: when a grace time begins it signals the steps alone."""
        now = time.monotonic()
        if self._signalled and now >= self._look_again_at:
            self._signalled = not self.job.look_for_preemption()
            self._look_again_at = time.monotonic() + _LOOK_AGAIN_S

    def _why_interrupted(self) -> None:
        """Find out who asked ranks that have saved and stopped though we did not ask them: Slurm, or a person.

        Where Slurm does not answer for a while, it is asked again: a preemption that is taken for a person's wish
        would end the run.
        """
        deadline = time.monotonic() + _ANSWER_BY_S
        while not self.job.look_for_preemption() and not self.job.stop.asked and time.monotonic() < deadline:
            time.sleep(self.job.spec.aegis.poll_s)
        names = [str(end["signal"]) for end in rank_ends(self.attempt) if end.get("signal")]
        if not self.job.stop.asked and names and names[0] in signal.Signals.__members__:
            self.job.stop.signum = signal.Signals[names[0]]
            self.job.event("signal", signal=names[0], attempt=self.attempt.number, to="ranks")

    def _look(self) -> None:
        """Everything new from srun, the ranks and the agents."""
        for failure in task_failures(_read(self.attempt))[len(self._failures) :]:
            self._failures.append(failure)
            ranks = list(failure.ranks)
            self.job.event(
                "ranks_ended", attempt=self.attempt.number, ranks=ranks, node=failure.node, what=failure.what
            )
            if self._stopped_in_order(failure):
                continue
            self._failed_at = self._failed_at or time.monotonic()
            self._note_cancelled()
            self.note(faults_of_failure(self.attempt, failure, self._rank_nodes(), self.signatures))
        self._look_at_nodes()

    def _stopped_in_order(self, failure: TaskFailure) -> bool:
        """Whether these ranks saved and stopped."""
        if failure.exit_code != Exit.INTERRUPTED:
            return False
        ends = {rank: end for rank in failure.ranks if (end := read_json(self.attempt.rank_end(rank)))}
        return stopped_in_order(failure, ends, asked=self._asked)

    @property
    def _asked(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self.job.stop.asked or self._asked_before

    def _note_cancelled(self) -> None:
        """Find out whether somebody cancelled the step, as long as it was not this supervisor that ended it."""
        if self._asked or self._killed_before or self._cancelled is not None:
            return
        if (fault := cancelled(self.attempt)) is not None:
            self.note([fault])

    @property
    def _cancelled(self) -> Fault | None:
        """That somebody cancelled the step, where that is known."""
        ours = (fault for fault in self.faults if fault.source == "srun")
        return next((fault for fault in ours if fault.kind == SLURM_CANCELLED), None)

    def _note_early_exits(self) -> bool:
        """Find ranks that exited with 0 before the end of the run and recorded nothing; returns whether there are.

        Their records may be a moment late: an NFS client asks for a directory again only now and then.
        """
        process = self.running.process
        if process.poll() is None or not process.left_exit_code or any(map(_is_early_exit, self.faults)):
            return False
        code, deadline = process.poll() or 0, time.monotonic() + _RECORDS_S
        dead = {fault.node for fault in self.faults if fault.kind == NODE_DEAD and fault.node is not None}
        while True:
            if code == 0 and committed_step(self.job.run) >= self.job.spec.total_steps:
                return False
            ends, log = rank_ends(self.attempt), _read(self.attempt)
            found = early_exits(
                code, log, ends, self._rank_nodes(), dead=dead, step=self._last_step(ends), now=time.time()
            )
            if not found or time.monotonic() > deadline:
                break
            time.sleep(self.job.spec.aegis.poll_s)
        self.note(found)
        return bool(found)

    def _last_step(self, ends: Iterable[Mapping[str, Any]]) -> int | None:
        """The last step that the attempt is known to have finished: its ranks finish a step together."""
        newest = newest_rows(self.job.run.metrics).step
        known = [self.detector.step, *(int(end.get("step", -1)) for end in ends)]
        if newest.get("attempt") == self.attempt.number:
            known.append(int(newest["step"]))
        return max(known) if max(known) >= 0 else None

    def _look_at_nodes(self, *, over: bool = False) -> None:
        """What the agents report, and nodes that Slurm has given up.

        Where ranks complain of lost peers, a silent node is dead: while they run only as long as nothing else
        explains it, but once they are over in any case, for none of them can tell any more that its node lives.
        And what is left of them then does not hang.
        """
        dead = failed_nodes(_read(self.attempt))
        if self.agents is None:
            known = {fault.node for fault in self.faults if fault.kind == NODE_DEAD}
            self.note(node_failed(node) for node in dead if node not in known)
            return
        for heard in self.agents.reports():
            if isinstance(heard.report, AgentReport) and heard.report.event == "signalled":
                self._signalled = True
            self.detector.feed(heard.report, heard.time, time.time() - (time.monotonic() - heard.time))
        self._look_once_signalled()
        found = self.detector.check(
            time.monotonic(),
            time.time(),
            dead={node: f"Slurm reports node {node} as failed" for node in dead},
            trouble={**self.agents.unreachable(), **self.agents.slurm_says()},
            lost_peers=self._failed_at is not None and (over or not self._has_root()),
        )
        self.note(fault for fault in found if not (over and fault.kind == RANK_HANG))

    def note(self, faults: Iterable[Fault]) -> None:
        """Remember and record faults; what no node's sensor can read is recorded once, and not for every node."""
        for fault in faults:
            self.faults.append(fault)
            if fault.kind == SENSOR_UNAVAILABLE:
                if (fault.line, fault.cleared) in self.told:
                    continue
                self.told.add((fault.line, fault.cleared))
            fields = fault.fields()
            self.job.event("fault_detected", attempt=self.attempt.number, fault_time=fields.pop("time"), **fields)

    def _why_give_up(self) -> tuple[str | None, Fault | None]:
        """Why the attempt must be ended now, and the fault that says so; None while there is reason to wait.

        Where ranks complain of lost peers, and nothing is known of those, their node may be dead. The agents find
        out; without them Slurm does (SlurmdTimeout), and gets the time to do so.
        """
        aegis, now = self.job.spec.aegis, time.monotonic()
        if self.job.stop.deadline is not None and now > self.job.stop.deadline:
            self.overdue = True
            asked = f"when asked to ({self.job.stop.asked_by})"
            return f"the ranks did not save and stop within {aegis.save_s:g} s (aegis.save_s) {asked}", None
        self._judge(now)
        if self._alarm.give_up:
            return self._alarm.reason, self._alarm.root
        if self._failed_at is None:
            return None, None
        if self._has_root():
            patience = aegis.settle_s
            why = f"the other ranks did not end within {aegis.settle_s:g} s of the first"
        elif self.agents is not None and self.agents.watched():
            patience = aegis.grace_s
            why = f"ranks lost their peers, and nothing else was found within {aegis.grace_s:g} s"
        else:
            patience = max(aegis.lost_peer_s, aegis.grace_s)
            why = f"ranks lost their peers, and Slurm named no failed node within {aegis.lost_peer_s:g} s"
        return (why if now > self._failed_at + patience else None), None

    def _judge(self, now: float) -> None:
        """Whether the faults end the attempt; those that it overcame are forgotten."""
        if len(self.faults) == self._judged and now < self._judge_at:
            return
        if any(fault.role in _SERIOUS or fault.kind == STRAGGLER for fault in self.faults):
            situation, aegis = self.situation(), self.job.spec.aegis
            if aegis.mode == "act":
                self._alarm = alarm(situation, self.history, aegis, spares=self.spares)
            self.faults = without_overcome(situation, aegis)
        self._judged, self._judge_at = len(self.faults), now + _JUDGE_S

    def _has_root(self, outcome: Verdict | None = None) -> bool:
        """Whether something is known that may be why the attempt ended, or ends."""
        if not any(fault.role == "root" for fault in self.faults):
            return False
        roots = roots_of(self.situation(outcome), self.job.spec.aegis)
        return any(fault.role == "root" for fault in roots)

    def _give_up(self, why: str, root: Fault | None) -> None:
        about = {} if root is None else {"root": root.fields()}
        self.job.event("step_killed", attempt=self.attempt.number, reason=why, **about)
        if self.agents is not None:
            self._dump_stacks(self.agents)

    def _dump_stacks(self, agents: Agents) -> None:
        """Every rank that is left writes the stacks of its threads to its log."""
        answers = agents.ask("stacks", self._alive(), timeout_s=_STACKS_S)
        ranks = sorted(rank for answer in answers.values() for rank in answer.values.get("ranks", ()))
        if ranks:
            self.job.event("stacks_dumped", attempt=self.attempt.number, nodes=sorted(answers), ranks=ranks)

    def _clear(self) -> None:
        """End every process of the attempt, wherever it is, and make sure of it."""
        job = self.job
        found = clear(
            self.running, self._alive, self.agents, job.slurm_id, job.spec.aegis, job.event, self._hear_meanwhile
        )
        self.note(found)
        if self.agents is not None and self.agents.watched():
            time.sleep(_LAST_LOOK_S)
            self._hear_of_every_node(self.agents)
        self._look_at_nodes(over=True)

    def _hear_meanwhile(self) -> bool:
        """Take what the agents report while processes are waited for; returns whether the run is asked to stop."""
        self._look_at_nodes(over=True)
        return self.job.stop.asked

    def _hear_of_every_node(self, agents: Agents) -> None:
        """Wait until each node that says nothing any more is heard again, or is found dead.

        Nodes often die together, and the last words of their agents come a second apart. An attempt on the node
        that is found last would be lost.
        """
        aegis = self.job.spec.aegis
        deadline = time.monotonic() + aegis.silent_s
        while time.monotonic() < deadline:
            self._look_at_nodes(over=True)
            if not agents.fell_silent(quiet_s(aegis)) & set(self._alive()):
                return
            time.sleep(aegis.poll_s)

    def _rank_nodes(self) -> list[str]:
        """The node of each rank."""
        return [node for node in self.running.nodes for _ in range(self.job.spec.ranks_per_node)]

    def _alive(self) -> list[str]:
        """Nodes of the attempt that are not known to be dead."""
        dead = {fault.node for fault in self.faults if fault.kind == NODE_DEAD}
        return [node for node in self.running.nodes if node not in dead]

    def _verdict(self, killed_because: str | None) -> Verdict:
        code = self.running.process.poll()
        code = 128 + signal.SIGKILL if code is None else code
        log = _read(self.attempt)
        early = [
            Cause(fault.line, fault.rank, fault.node, int(Exit.DONE), fault.step)
            for fault in self.faults
            if _is_early_exit(fault)
        ]
        verdict = judge(
            code,
            rank_ends(self.attempt),
            self._failures,
            failed_nodes(log),
            log[-2000:],
            killed_because,
            early=early,
            asked=self._asked,
        )
        if self._cancelled is not None and verdict.outcome == "failed" and not failed_nodes(log):
            return replace(verdict, cause=Cause(self._cancelled.line, exit_code=verdict.exit_code))
        return verdict


def _is_early_exit(fault: Fault) -> bool:
    """Whether srun's silence says so, and not a record of the rank."""
    return fault.kind == EARLY_EXIT and fault.source == "srun"


def committed_step(run: RunDir) -> int:
    """Step of the newest checkpoint of a run by the names of its directories; -1 where there is none."""
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return -1
    steps = [int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdecimal()]
    return max(steps, default=-1)


def _read(attempt: AttemptDir) -> str:
    """What srun has said so far; nothing while the file system does not answer."""
    try:
        return attempt.step_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""The end of an attempt: every process of it is gone, on every node, before the next one starts.

What survives keeps ports, GPU memory and shared memory, and writes into the same files: it can make the next
attempt fail as well. So it is not assumed that a killed step is gone. The agents look, kill and look again.

A process that waits for a file system or a driver cannot die before that answers, and may still write into the
checkpoint. Nothing starts next to it: the supervisor waits, and looks again and again, for as long as the core
says (core/unkillable.py). If the run is asked to stop, nothing is waited for.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.unkillable import faults_of_unkillable, patience_s
from zslurm.aegis.protocol import Answer
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.attempt_starter import RunningAttempt
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.types import Fault
from zslurm.job.step import kill_step
from zslurm.run.events import AttemptCleared, StartPostponed
from zslurm.slurm.hostlist import compress

_SRUN_ENDS_S = 3.0
"""How long srun gets to see that its ranks are gone."""

_TAKES_ORDER_S = 1.0
"""How long Slurm gets to take the order to end the step, before srun itself is killed."""

_FIRST_REPORT_S = 15.0
"""How long agents that have just been started get for their first report."""

_ANSWER_S = 5.0
"""How long an answer may take besides the work that it is about."""

LOOK_S = 2.0
"""Between two looks whether processes that could not die are gone."""


def clear(
    job: Job,
    running: RunningAttempt,
    state: AttemptState,
    agents: Agents | None,
    collect: Callable[[], bool],
) -> list[Fault]:
    """End what is left of an attempt, and wait for what cannot die yet.

    Args:
        job: the start of the job.
        running: the attempt.
        state: all that is known of it.
        agents: the agents, if the run has some.
        collect: takes what is reported, and returns whether the run is asked to stop; called again and again while
            something is waited for.

    Returns:
        If processes were left: one fault for what held them up on several nodes, one for those that stay.
    """
    started, process, nodes = time.monotonic(), running.process, state.alive
    number, settings, job_id = running.attempt.number, job.spec.aegis, job.slurm_id

    def ended() -> bool:
        process.reap()
        return process.poll() is not None

    answers: dict[str, Answer] = {}
    if agents is not None and running.adopted:  # whose step ended before our agents could report
        _wait(lambda: _any_responding(state, collect), _FIRST_REPORT_S)
    if agents is not None:
        collect()
        reporting = state.nodes_heard.reporting(time.monotonic())
        if heard := [node for node in nodes if node in reporting]:
            answers = agents.ask("clean_up", heard, timeout_s=settings.teardown_s + _ANSWER_S, attempt=number)
    if not ended() and len(answers) == len(running.nodes):
        _wait(ended, _SRUN_ENDS_S)
    if not ended():
        if answers:  # the ranks are gone: what is left is Slurm's own tidying, which may wait for a dead node
            threading.Thread(target=kill_step, args=(process, running.attempt, job_id), daemon=True).start()
            _wait(ended, _TAKES_ORDER_S)
        else:
            kill_step(process, running.attempt, job_id)
        process.signal_group(signal.SIGKILL)
        _wait(ended, settings.teardown_s)
    killed = sum(len(answer.values.get("killed", ())) for answer in answers.values())
    faults: list[Fault] = []
    if agents is not None and _with_processes(answers):
        faults = _Unkillable(job, agents, number, answers, state).wait_for_exit(collect)
    remaining = {node: answer.why for node, answer in answers.items() if not answer.ok}
    unseen = [node for node in nodes if node not in answers] if agents is not None else []
    seconds = round(time.monotonic() - started, 3)
    # GPU memory that stays in use is recorded, no more: on a shared node it may be somebody else's.
    job.record(AttemptCleared(attempt=number, seconds=seconds, killed=killed, left=remaining, unseen=unseen))
    return faults


@dataclass(frozen=True)
class _Unkillable:
    """Processes of an attempt that were killed, and are not gone.

    Attributes:
        job: the start of the job.
        agents: who look.
        number: of the attempt.
        answers: the last of each agent; brought up to date.
        state: all that is known of the attempt.
    """

    job: Job
    agents: Agents
    number: int
    answers: dict[str, Answer]
    state: AttemptState

    def wait_for_exit(self, is_asked_to_stop: Callable[[], bool]) -> list[Fault]:
        """Wait until they are gone; return faults for what held them up and for those that stay.

        There are none if the run is asked to stop.
        """
        began, seen = time.monotonic(), time.time()
        settings, nodes = self.job.spec.aegis, self._nodes()
        most = nodes
        while nodes and settings.mode == "act":
            if is_asked_to_stop():  # then nothing starts next to them
                return []
            if nodes is most:
                reason = f"killed processes cannot die yet on {compress(nodes)}"
                self.job.record(StartPostponed(reason=reason))
            self._look(nodes)
            nodes = self._nodes()
            most = nodes if len(nodes) > len(most) else most
            if time.monotonic() - began > patience_s(len(most), settings.teardown_s):
                break
            time.sleep(min(LOOK_S, settings.teardown_s))
        return faults_of_unkillable(most, {node: self.answers[node].why for node in nodes}, seen)

    def _nodes(self) -> list[str]:
        """Return where they are."""
        alive = self.state.alive
        return [node for node in _with_processes(self.answers) if node in alive]

    def _look(self, nodes: Sequence[str]) -> None:
        """Look again, and clear up if they are gone. Of who does not answer nothing new is known."""
        looked = self.agents.ask("clean_up", nodes, timeout_s=_ANSWER_S, attempt=self.number, kill=False)
        self.answers.update(looked)
        if gone := sorted(looked.keys() - _with_processes(looked)):
            patience = self.job.spec.aegis.teardown_s + _ANSWER_S
            self.answers.update(self.agents.ask("clean_up", gone, timeout_s=patience, attempt=self.number))


def _any_responding(state: AttemptState, collect: Callable[[], bool]) -> bool:
    collect()
    return state.nodes_heard.any_responding(time.monotonic())


def _with_processes(answers: Mapping[str, Answer]) -> list[str]:
    """Return nodes on which processes are left."""
    return [node for node, answer in answers.items() if answer.values.get("left")]


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)

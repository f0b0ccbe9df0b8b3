"""The end of an attempt: every process of it is gone, on every node, before the next one starts.

What survives keeps ports, GPU memory and shared memory, and writes into the same files: on its own it is enough to
make the next attempt fail as well. So it is not assumed that a killed step is gone. The agents look, kill and look
again; a node on which something cannot be killed is not used again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence

from zslurm.aegis.agents import Agents
from zslurm.aegis.evidence import Fault
from zslurm.aegis.starts import Running
from zslurm.config.aegis import AegisSection
from zslurm.launch.step import kill_step

_SRUN_ENDS_S = 3.0
"""How long srun gets to see that its ranks are gone."""

_TOLD_S = 1.0
"""How long Slurm gets to take the order to end the step, before srun itself is killed."""

_QUIET_S = 2.5
"""An agent that has said nothing for so long is not waited for: it reports every second, or as is set."""

_FIRST_WORD_S = 15.0
"""How long agents that have just been started get to say their first word."""


def quiet_s(settings: AegisSection) -> float:
    """Seconds after which an agent that has said nothing is not waited for."""
    return max(_QUIET_S, 3 * settings.sensors.progress_s)


def end_step(running: Running, job_id: str | None) -> None:
    """End every task of the step by asking Slurm, and srun itself."""
    kill_step(running.process, running.attempt, job_id)


def clear(
    running: Running,
    nodes: Sequence[str],
    agents: Agents | None,
    job_id: str | None,
    settings: AegisSection,
    event: Callable[..., None],
) -> list[Fault]:
    """End what is left of an attempt.

    Args:
        running: the attempt.
        nodes: those of its nodes that live.
        agents: the agents, where the run has some.
        job_id: Slurm's job; None on the local launcher.
        settings: how long it may take.
        event: records what was found.

    Returns:
        A fault for each node on which something could not be ended.
    """
    started, process = time.monotonic(), running.process
    number = running.attempt.number

    def ended() -> bool:
        process.reap()
        return process.poll() is not None

    answers = {}
    if agents is not None and running.adopted:  # whose step ended before our agents could say a word
        _wait(agents.watched, _FIRST_WORD_S)
    heard = [node for node in nodes if agents is not None and node not in agents.quiet(quiet_s(settings))]
    if agents is not None and heard:
        answers = agents.ask("sweep", heard, timeout_s=settings.teardown_s, attempt=number)
    if not ended() and len(answers) == len(running.nodes):
        _wait(ended, _SRUN_ENDS_S)
    if not ended():
        if answers:  # the ranks are gone: what is left is Slurm's own tidying, which may wait for a dead node
            threading.Thread(target=kill_step, args=(process, running.attempt, job_id), daemon=True).start()
            _wait(ended, _TOLD_S)
        else:
            kill_step(process, running.attempt, job_id)
        process.signal_group(signal.SIGKILL)
        _wait(ended, settings.teardown_s)
    killed = sum(len(answer.values.get("killed", ())) for answer in answers.values())
    left = {node: answer.why for node, answer in answers.items() if not answer.ok}
    silent = [node for node in nodes if node not in answers] if agents is not None else []
    seconds = round(time.monotonic() - started, 3)
    event("attempt_cleared", attempt=number, seconds=seconds, killed=killed, left=left, unseen=silent)
    now = time.time()
    # GPU memory that stays in use is recorded, no more: on a shared node it may be somebody else's.
    return [
        Fault("orphans", "root", "node", now, "agent", f"they cannot be killed: {answer.why}", node=node)
        for node, answer in answers.items()
        if answer.values.get("left")
    ]


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)

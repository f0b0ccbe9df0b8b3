"""The steps of the warm processes of one attempt.

There is a process for each node, and on each spare as many as a node has ranks. The core knows which of them wait
(core/attempt.py). Those on the nodes of ranks take the places of ranks in rows memory-01 to 03, 10, 13, 17, 41 to
45, 47, 49, 50 and 53 of the fault matrix, those on spares in rows memory-04, 06, 21, 51 and 52.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zslurm.aegis.supervisor.helper_jobs import HelperOf, by_job
from zslurm.aegis.supervisor.job import Job
from zslurm.core.files import read_json, write_atomically
from zslurm.core.processes import DetachedProcess
from zslurm.job.in_memory.warm_step import warm_local_step, warm_name, warm_slurm_step
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import kill_step
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure, task_failures


@dataclass
class _Step:
    """One step: its process, the number of its first member, how many ends were seen, and its helper job."""

    process: DetachedProcess
    first: int
    seen: int = 0
    helper: str | None = None


class WarmPool:
    """Starts warm processes, and notices their ends."""

    def __init__(self, job: Job, attempt: AttemptDir, python: Interpreter, helper_of: HelperOf = dict) -> None:
        """Prepare; no process is started yet."""
        self._job, self._attempt, self._python, self._helper_of = job, attempt, python, helper_of
        self._steps: list[_Step] = []
        self._next = 1

    @property
    def runs(self) -> bool:
        """Whether any of their steps runs."""
        return any(step.process.poll() is None for step in self._steps)

    def start(self, nodes: Sequence[str], per_node: int = 1) -> str:
        """Start a number on each of these nodes; return why that failed, empty if it did not."""
        if per_node < 1:
            return ""
        problems = [self._start(at, per_node, helper) for helper, at in by_job(nodes, self._helper_of())]
        return next(filter(None, problems), "")

    def _start(self, nodes: Sequence[str], per_node: int, helper: str | None) -> str:
        """Start a number on each of these nodes, in a step of a helper job, or of this one."""
        job, attempt, first = self._job, self._attempt, self._next
        if job.on_slurm:
            plan = warm_slurm_step(
                job.spec, job.run, attempt, self._python, nodes, per_node=per_node, first=first, helper=helper
            )
        else:
            plan = warm_local_step(
                job.spec, job.run, attempt, self._python, nodes[0], per_node=per_node, first=first
            )
        described = {"first": first, "nodes": list(nodes), "per_node": per_node, "helper": helper}
        try:
            write_atomically(attempt.path / f"warm-{first:05d}.step", json.dumps(described) + "\n")
            process = DetachedProcess.start(
                plan.command,
                env=plan.env,
                log=attempt.warm_log(first),
                record_file=attempt.path / f"warm-{first:05d}.json",
                exit_file=attempt.path / f"warm-{first:05d}.exit",
            )
        except OSError as error:
            return f"{error.filename or 'the step'}: {error.strerror}"
        self._note(_Step(process, first, helper=helper), len(nodes) * per_node)
        return ""

    def _note(self, step: _Step, count: int) -> None:
        self._steps.append(step)
        self._next = max(self._next, step.first + count)

    def adopt(self) -> Counter[str]:
        """Find the steps that another supervisor has started; return how many processes that are, by node."""
        started: Counter[str] = Counter()
        for record in sorted(self._attempt.path.glob("warm-*.json")):
            exit_file = record.with_suffix(".exit")
            described, process = read_json(record.with_suffix(".step")), DetachedProcess.adopt(record, exit_file)
            if described is not None and process is not None:
                nodes, per_node = described["nodes"], described["per_node"]
                step = _Step(process, described["first"], helper=described.get("helper"))
                self._note(step, len(nodes) * per_node)
                started.update(dict.fromkeys(nodes, per_node))
        return started

    def ended(self) -> list[tuple[str, TaskFailure]]:
        """Return the members that have failed since the last call, and how."""
        ended_tasks = []
        for step in self._steps:
            step.process.reap()
            failures = task_failures(self._log(step))
            for failure in failures[step.seen :]:
                ended_tasks += [(warm_name(failure.node, step.first, task), failure) for task in failure.ranks]
            step.seen = len(failures)
        return ended_tasks

    def _log(self, step: _Step) -> str:
        with contextlib.suppress(OSError):
            return self._attempt.warm_log(step.first).read_text(encoding="utf-8", errors="replace")
        return ""

    def end(self) -> None:
        """End all of them, those too that are ranks now."""
        for step in self._steps:
            if step.process.poll() is None:
                if self._job.on_slurm:
                    kill_step(step.process, self._attempt, step.helper or self._job.slurm_id)
                step.process.signal_group(signal.SIGKILL)
            step.process.reap()

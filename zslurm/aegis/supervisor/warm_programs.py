"""The keepers of warm programs of one start of a job (`trainer.warm`): started once, ended with the run."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Sequence

from zslurm.aegis.supervisor.job import Job
from zslurm.core.errors import ZslurmError
from zslurm.core.processes import DetachedProcess
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.program.warm_step import STEP_NAME, keepers_step
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.version import why_not_shared

_LOG = logging.getLogger(__name__)


class WarmPrograms:
    """Starts the step of the keepers, finds that of an earlier supervisor of the job, and ends it."""

    def __init__(self, job: Job) -> None:
        """Prepare; nothing is started yet."""
        self._job = job
        directory, name = job.run.warm, f"{job.job_id}-{job.restart}"
        self._record, self._exit = directory / f"{name}.json", directory / f"{name}.exit"
        self._off = job.spec.trainer is None or not job.spec.trainer.warm

    def start(self, python: Interpreter, nodes: Sequence[str]) -> None:
        """Start the keepers on these nodes, unless they run, or have ended: then ranks start in the usual way."""
        if self._off or DetachedProcess.adopt(self._record, self._exit) is not None:
            return
        job = self._job
        try:
            if reason := self._why_not(python):
                self._leave_out(reason)
                return
            job.run.warm.mkdir(exist_ok=True)
            plan = keepers_step(job.spec, job.run, python, nodes)
            DetachedProcess.start(
                plan.command, env=plan.env, log=job.run.warm / "step.log",
                record_file=self._record, exit_file=self._exit,
            )  # fmt: skip
        except (OSError, ZslurmError) as error:
            self._leave_out(str(error))

    def _leave_out(self, reason: str) -> None:
        self._off = True
        _LOG.warning("trainer.warm: off, ranks start in the usual way: %s", reason)

    def _why_not(self, python: Interpreter) -> str:
        """Return why programs cannot be kept warm; empty if they can.

        Raises:
            ZslurmError: Slurm does not answer.
        """
        job = self._job
        if python.srun_options or len(python.command) > 1:
            return "the ranks run in a container"
        if not job.on_slurm or not job.spec.cluster.gpus_per_node:
            return ""
        why = why_not_shared(SlurmClient(job.environ, timeout_s=10.0).version())
        return f"steps next to the ranks {why}" if why else ""

    def end(self) -> None:
        """End the keepers; those that Slurm does not end now end by themselves."""
        process = DetachedProcess.adopt(self._record, self._exit)
        if self._off or process is None or process.poll() is not None:
            return
        if self._job.slurm_id is not None:
            with contextlib.suppress(ZslurmError):
                SlurmClient(self._job.environ, timeout_s=10.0).kill_step(self._job.slurm_id, STEP_NAME)
        process.signal_group(signal.SIGTERM)
        process.reap()

"""What a task knows of its job, and what it does at a signal: checkpoint and requeue, at a preemption too.

Slurm sends the signal of `--signal` before the time limit, and at a preemption only if the site has
`PreemptParameters=send_user_signal`. Elsewhere a preempted job gets SIGTERM and its grace time, which submitit
ignores. Here a task asks Slurm why it got SIGTERM: a job that `scancel` ends does as submitit's do, and one that
is preempted calls `checkpoint()` and returns to the queue.
"""

from __future__ import annotations

import os
import shutil
import signal
import types

from submitit.core import job_environment, logger, utils
from submitit.slurm import slurm

_ASK_S = 10.0
"""How long Slurm may take to say why: the grace time runs, and the function waits."""


class ZslurmJobEnvironment(slurm.SlurmJobEnvironment):
    """The environment of a job that the executor submitted."""

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        signals = _Signals(self, job_environment.SignalHandler(self, paths, submission))
        signal.signal(signal.SIGTERM, signals.terminated)
        signal.signal(signal.SIGCONT, signals.handler.bypass)
        signal.signal(self._usr_sig(), signals.asked)

    def why_terminated(self) -> str:
        """Ask Slurm; empty if it does not preempt or requeue the job, or cannot be asked from here."""
        from zslurm.core.errors import ZslurmError
        from zslurm.slurm import environment
        from zslurm.slurm.client import SlurmClient
        from zslurm.slurm.preemption import find_preemption
        from zslurm.slurm.run_command import Retries

        client = SlurmClient(timeout_s=_ASK_S, retries=Retries(attempts=1))
        job_id = environment.own_job_id() or ""
        restart = environment.restart_count(os.environ)
        try:
            if not client.can_control():
                return ""
            preemption = find_preemption(client, self.job_id, restart)
            if preemption is not None:
                gone = "requeued" if preemption.requeued else "preempted"
                return "cancelled by preemption" if preemption.mode == "cancel" else gone
            record = next(iter(client.queue([job_id]).values()), None)
        except ZslurmError as error:
            logger.get_logger().warning(f"Slurm does not say why: {error}")
            return ""
        over = record is not None and (record.restarts > restart or record.state.is_waiting)
        return "requeued" if over else ""

    def _requeue(self, countdown: int) -> None:
        """Put this job back into the queue.

        Raises:
            UncompletedJobError: compute nodes have no scontrol.
        """
        if shutil.which("scontrol") is None:
            raise utils.UncompletedJobError(
                "Job not requeued because: compute nodes have no scontrol. Submit it again; its pickle is kept."
            )
        super()._requeue(countdown)


class _Signals:
    """What a task does at signals: the first that asks for something is answered, once, whatever else comes.

    A preemption may bring SIGTERM and the signal of `--signal`, and Slurm repeats itself; a checkpoint that is
    interrupted by the next one would fail.
    """

    def __init__(self, environment: ZslurmJobEnvironment, handler: job_environment.SignalHandler) -> None:
        self.handler = handler
        self._environment = environment
        self._busy = self._asked_meanwhile = False

    def asked(self, signum: int, frame: types.FrameType | None = None) -> None:
        """Checkpoint and requeue, at the signal that comes before the time limit."""
        if self._busy:
            self._asked_meanwhile = True
            self.handler.bypass(signum, frame)
            return
        self._busy = True
        self.handler.checkpoint_and_try_requeue(signum, frame)

    def terminated(self, signum: int, frame: types.FrameType | None = None) -> None:
        """Checkpoint if Slurm preempts the job or has requeued it; otherwise do as submitit does: nothing.

        Raises:
            UncompletedJobError: the site's preemption cancels jobs; the function's checkpoint is in its pickle.
        """
        self.handler.bypass(signum, frame)
        if self._environment.global_rank or self._busy:
            return  # rank 0 acts for all
        self._busy = True
        why = self._environment.why_terminated()
        logger.get_logger().info(f"Why Slurm sent it: {why or 'neither preempted nor requeued'}")
        if why == "preempted":
            self.handler.checkpoint_and_try_requeue(signum, frame)
        elif why == "requeued":
            self.handler.checkpoint_and_exit(signum, frame)
        elif why == "cancelled by preemption":
            try:
                self.handler.checkpoint_and_exit(signum, frame)
            except SystemExit:
                raise utils.UncompletedJobError(
                    "Job not requeued because: the site's preemption cancels jobs (PreemptMode=CANCEL)."
                ) from None
        self._busy = False
        if self._asked_meanwhile:
            self.asked(signum, frame)

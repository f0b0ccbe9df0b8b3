"""What a task knows of its job, and what it does at a signal: checkpoint and requeue, at a preemption too.

Slurm sends the signal of `--signal` before the time limit, and at a preemption only where the site has
`PreemptParameters=send_user_signal`. Elsewhere a preempted job gets SIGTERM and its grace time, which submitit
ignores. Here a task asks Slurm why it got SIGTERM: a job that `scancel` ends does as submitit's do, and one that
is preempted calls `checkpoint()` and returns to the queue.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import types

from submitit.core import job_environment, logger, utils
from submitit.slurm import slurm


class ZslurmJobEnvironment(slurm.SlurmJobEnvironment):
    """The environment of a job that the executor submitted."""

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        handler = job_environment.SignalHandler(self, paths, submission)
        signal.signal(signal.SIGTERM, functools.partial(self._terminated, handler))
        signal.signal(signal.SIGCONT, handler.bypass)
        signal.signal(self._usr_sig(), handler.checkpoint_and_try_requeue)

    def _terminated(
        self, handler: job_environment.SignalHandler, signum: int, frame: types.FrameType | None = None
    ) -> None:
        """Checkpoint where Slurm preempts the job or has requeued it; otherwise do as submitit does: nothing.

        Raises:
            UncompletedJobError: the site's preemption cancels jobs; the function's checkpoint is in its pickle.
        """
        handler.bypass(signum, frame)
        if self.global_rank:
            return  # rank 0 acts for all
        why = self._why_terminated()
        logger.get_logger().info(f"Why Slurm sent it: {why or 'neither preempted nor requeued'}")
        if why == "preempted":
            handler.checkpoint_and_try_requeue(signum, frame)
        elif why == "requeued":
            handler.checkpoint_and_exit(signum, frame)
        elif why == "cancelled by preemption":
            try:
                handler.checkpoint_and_exit(signum, frame)
            except SystemExit:
                raise utils.UncompletedJobError(
                    "Job not requeued because: the site's preemption cancels jobs (PreemptMode=CANCEL)."
                ) from None

    def _why_terminated(self) -> str:
        """Ask Slurm; empty where it does not preempt or requeue the job, or cannot be asked from here."""
        from zslurm.core.errors import ZslurmError
        from zslurm.slurm.client import SlurmClient
        from zslurm.slurm.preemption import find_preemption

        client, job_id = SlurmClient(), os.environ.get("SLURM_JOB_ID", "")
        restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        try:
            if not client.can_control():
                return ""
            found = find_preemption(client, self.job_id, restart)
            if found is not None:
                gone = "requeued" if found.requeued else "preempted"
                return "cancelled by preemption" if found.mode == "cancel" else gone
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

"""submitit's Slurm executor with our script, a clean environment around sbatch, and errors in one line.

What is overridden of submitit: `__init__`, `affinity`, `_valid_parameters`, `_internal_update_parameters`,
`_internal_process_submissions`, `_make_submission_file_text`, `_make_submission_command`, `_submit_command` and
`_num_tasks`. The launcher of runs (submit/slurm_launcher.py) uses the same class.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import submitit
from submitit.core import core, utils

from zslurm.core.errors import ConfigError, SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.slurm.client import SlurmClient, SubmissionEnded
from zslurm.slurm.environment import names_to_scrub
from zslurm.slurm.run_command import (
    Retries,
    advice_on_refusal,
    controller_was_away,
    may_have_arrived,
    words_of_sbatch,
)
from zslurm.submit.plugin.auto import pass_parameters_on
from zslurm.submit.plugin.job import ZslurmJob
from zslurm.submit.plugin.parameters import OWN, PARAMETERS, UnknownParameter, unknown_parameter

if TYPE_CHECKING:  # a job imports this module too: it needs no configuration
    from zslurm.submit.plugin.script import Function

_LATER = "a job that appears later ends by itself within a minute: look with `squeue --me`, then submit again"


class SubmissionRefused(SlurmRefused, utils.FailedJobError):
    """sbatch refused the job: submitit's error for that, and ours."""


class ControllerUnavailable(SlurmUnavailable, utils.FailedJobError):
    """Slurm's controller does not answer: submitit's error for that, and ours."""


class ZslurmExecutor(submitit.SlurmExecutor):
    """Submits functions with the template and the profile of a cluster."""

    job_class = ZslurmJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        profile: str | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Prepare submissions into a folder that all nodes share; nothing is written yet.

        Args:
            folder: of pickles, scripts, logs and results; `%j`, `%A`, `%a` are as submitit has them.
            max_num_timeout: how often a job with `checkpoint()` is requeued at its time limit.
            max_pickle_size_gb: largest pickle that is submitted.
            python: shell command of the Python in the job; default: this one.
            profile: name of the cluster's profile; default: as for `zslurm submit`.
            overrides: `KEY=VALUE` assignments over the profile, as `--set` takes them.

        Raises:
            SlurmUnavailable: there is no Slurm here.
            ConfigError: the folder's name holds control characters.
        """
        if not self.affinity() > 0:
            raise SlurmUnavailable("sbatch: not found on this machine; submit from a login node")
        if not str(folder).isprintable():
            raise ConfigError(f"folder: a path here cannot hold control characters: {str(folder)!a}")
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)
        options = {"profile": profile, "overrides": list(overrides) or None}
        self.parameters.update({name: value for name, value in options.items() if value is not None})
        self._function: tuple[dict[str, Any], Function] | None = None
        self._of_one_submission: frozenset[str] = frozenset()
        self._files: list[Path] = []  # of the submission under way, besides the pickles

    @classmethod
    def affinity(cls) -> int:
        """Return 1 if Slurm is installed: `AutoExecutor` uses zslurm only if you ask for it."""
        return 1 if shutil.which("sbatch") or shutil.which("srun") else -1

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(PARAMETERS | OWN)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Check parameters over the profile, and keep them.

        Raises:
            ConfigError: one is unknown or refused; what, why, and what to do instead.
            NotFound: there is no such profile.
        """
        if unknown := sorted(kwargs.keys() - self._valid_parameters()):
            raise UnknownParameter(unknown_parameter(unknown[0]))
        before, self._function = self.parameters.copy(), None  # the profile is read again
        self.parameters.update(kwargs)
        try:
            self._resolve()
        except ZslurmError:
            self.parameters.clear()  # AutoExecutor holds the same dictionary
            self.parameters.update(before)
            raise

    def _resolve(self) -> Function:
        """Return how a function is to run by the present parameters."""
        own_parameters = {
            name: value for name, value in self.parameters.items() if name not in self._of_one_submission
        }
        if self._function is None or self._function[0] != own_parameters:
            from zslurm.submit.plugin.script import resolve_function

            self._function = (own_parameters, resolve_function(own_parameters))
        return self._function[1]

    def _internal_process_submissions(
        self, delayed_submissions: Sequence[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """Submit one function as a job, or several as an array; if that fails, no file is left.

        Raises:
            ConfigError: the pickles are larger than `max_pickle_size_gb`.
            ZslurmError: see `_submit_command`.
        """
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        pickles = [folder / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        array = {"map_count": len(pickles)} if len(pickles) > 1 else {}
        self._files = []
        try:
            with self._parameters(time=self._minutes(), **array):
                self._write(delayed_submissions, pickles)
                self._throttle()
                self._last_job_submitted = time.time()
                first = self._submit_command(self._submitit_command_str)
        except Exception:
            for path in (*pickles, *self._files):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        jobs = [first]
        if array:
            tasks, name = list(range(first.num_tasks)), first.job_id
            jobs = [self.job_class(self.folder, f"{name}_{index}", tasks) for index in range(len(pickles))]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _write(self, submissions: Sequence[utils.DelayedSubmission], pickles: Sequence[Path]) -> None:
        """Write the pickles; of many only the first one's size is known before the others are written."""
        try:
            pickles[0].parent.mkdir(parents=True, exist_ok=True)
            for delayed, path in zip(submissions, pickles, strict=True):
                delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
                delayed.dump(path)
                if path == pickles[0]:
                    self._check_size(path.stat().st_size * len(pickles))
        except OSError as error:
            raise ZslurmError(f"{error.filename or self.folder}: cannot be written: {error.strerror}") from error

    def _check_size(self, size: int) -> None:
        if size > self.max_pickle_size_gb * 2**30:
            from zslurm.checkpoint_tools.quantities import show_bytes

            raise ConfigError(
                f"the pickles of function and arguments take {show_bytes(size)}, more than "
                f"{self.max_pickle_size_gb} GiB; pass the path of a file, or raise slurm_max_pickle_size_gb"
            )

    @contextlib.contextmanager
    def _parameters(self, **further: Any) -> Iterator[None]:
        """Add parameters for one submission: submitit reads the time limit there."""
        kept, names = self.parameters, self._of_one_submission
        self.parameters, self._of_one_submission = {**kept, **further}, names | (further.keys() - kept.keys())
        try:
            yield
        finally:
            self.parameters, self._of_one_submission = kept, names

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        from zslurm.submit.plugin.script import function_script

        secrets = utils.JobPaths.get_first_id_independent_folder(self.folder) / f".secrets_{uid}.env"
        self._files.append(secrets)
        return function_script(self._resolve(), command, self.folder, secrets, self.parameters.get("map_count"))

    def _minutes(self) -> int:
        """Return the time limit of the next submission."""
        return self._resolve().minutes

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        self._files.append(submission_file_path)
        scrub = [word for name in names_to_scrub(os.environ) for word in ("-u", name)]
        return [*(["env", *scrub] if scrub else []), "sbatch", str(submission_file_path)]

    def _submit_command(self, command: str) -> core.Job[Any]:
        """Call sbatch.

        Raises:
            SlurmUnavailable: the controller does not answer.
            SlurmRefused: sbatch refused the job; its message is passed on.
            ZslurmError: the folder cannot be written.
        """
        try:
            # submitit passes sbatch's complaints on while it runs; they come in one line, below.
            with contextlib.redirect_stderr(io.StringIO()):
                return super()._submit_command(command)
        except OSError as error:
            if error.filename in ("env", "sbatch"):
                raise ControllerUnavailable(
                    "sbatch: not found on this machine; submit from a login node"
                ) from error
            where = error.filename or self.folder
            raise ZslurmError(f"{where}: cannot be written: {error.strerror}") from error
        except utils.FailedJobError as error:
            if not may_have_arrived(str(error)):
                raise _refusal(str(error)) from error
            return self._adopt(self._files[-1])

    def _adopt(self, script: Path) -> core.Job[Any]:
        """Return the job of a script that sbatch sent, if Slurm has it: sbatch got no answer.

        Raises:
            SlurmUnavailable: Slurm does not show one, or does not answer.
            SlurmRefused: the job has ended.
        """
        unknown = "sbatch got no answer from the Slurm controller"
        try:
            job_id = self._find(script)
        except SubmissionEnded as error:
            raise SubmissionRefused(f"{unknown}, and {error}") from error
        except ZslurmError as error:
            raise ControllerUnavailable(
                f"{unknown}, and it is not known whether it has a job: {error}; {_LATER}"
            ) from error
        if job_id is None:
            raise ControllerUnavailable(f"{unknown}, which shows no job of this submission; {_LATER}")
        job: core.Job[Any] = self.job_class(self.folder, job_id, list(range(self._num_tasks())))
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job

    def _find(self, script: Path) -> str | None:
        """Look for the job for half a minute: a busy controller may accept it late."""
        client, looks = SlurmClient(), Retries(attempts=6)
        for look in range(looks.attempts):
            if (job_id := client.job_of_script(str(script))) is not None:
                return job_id
            time.sleep(looks.pause_after(look))
        return None

    def _num_tasks(self) -> int:
        return self._resolve().tasks


def _refusal(text: str) -> SubmissionRefused | ControllerUnavailable:
    """Return the error that sbatch's message in submitit's error means."""
    words = words_of_sbatch(text)
    if controller_was_away(text):
        return ControllerUnavailable(f"sbatch: the Slurm controller does not answer: {words}")
    return SubmissionRefused(f"sbatch refused the job: {words or ' '.join(text.split())}{advice_on_refusal(text)}")


pass_parameters_on(ZslurmExecutor.name())

"""A run, from Python: what it does, what happened to it, its numbers, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from zslurm.checkpoint_tools.plain import StrPath
from zslurm.core.errors import ZslurmError
from zslurm.run.find import find, find_to_change
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state.rest import states_until_rest
from zslurm.run.state.run_state import RunState, look

if TYPE_CHECKING:
    from zslurm.api.checkpoint import Checkpoint
    from zslurm.checkpoint_tools import Listing
    from zslurm.config.spec import RunSpec
    from zslurm.run.events.event import Event
    from zslurm.run.metrics.columns import Metrics


class WaitTimeout(ZslurmError, TimeoutError):
    """A run did not come to rest within the time that was given."""


class Run:
    """A run that was submitted. Nothing is kept: each call reads its files, or asks Slurm.

    Attributes:
        name: of the run.
        path: its directory.
        job_id: the job that it was submitted as, if this program submitted it.
        notes: what `zslurm submit` prints of the submission, if this program submitted it.
    """

    def __init__(self, run: RunDir, *, job_id: str | None = None, notes: tuple[str, ...] = ()) -> None:
        """Use `load_run` or `submit`."""
        self._run = run
        self.job_id, self.notes = job_id, notes

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._run.name

    @property
    def path(self) -> Path:
        """The directory of the run."""
        return self._run.path

    @property
    def config(self) -> RunSpec:
        """The configuration that the run was submitted with last, typed; `config.model_dump()` is a dictionary.

        Raises:
            ConfigError: it is missing or damaged.
        """
        from zslurm.config.load import load_spec

        return load_spec(self._run.config)

    def status(self) -> RunState:
        """Return everything that is known of the run now: `state`, `step`, `loss`, `job_id`, `cause`, ...

        If Slurm does not answer, the state is `unknown`, and `reason` says why.
        """
        return look(self._run)

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Wait until the run has come to rest, and return how: `completed`, `failed`, `cancelled`, ...

        A job that Slurm holds because a node could not start it is released without that node.

        Args:
            timeout_s: how long to wait at most; None: as long as it takes. A run in the queue is waited for.

        Raises:
            WaitTimeout: the run is still active.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for state in states_until_rest(self._run, deadline=deadline):
            last = state
            if state.state == "held":
                from zslurm.submit.held_launch import release_failed_launches

                release_failed_launches([state])
        if last.active:
            raise WaitTimeout(f"{self.name}: still {last.state} after {timeout_s:g} seconds")
        return last

    def cancel(self, *, wait: bool = False) -> str | None:
        """Let the run save and stop, with `wait` until it has; returns its job, None if nothing is active.

        Raises:
            SlurmUnavailable, SlurmRefused: from Slurm.
            ZslurmError: a local run is on another machine, or the run is a copy.
        """
        from zslurm.submit.control import cancel

        return cancel(find_to_change(str(self.path), "cancel"), wait=wait)

    def requeue(self, *, now: bool = False, exclude: str | None = None) -> str:
        """Put the run's job back into the queue, as `zslurm requeue` does; returns the job.

        Raises:
            NotFound, ConfigError, RunCompleted, SlurmUnavailable, SlurmRefused: see `zslurm requeue`.
        """
        from zslurm.submit.control import requeue

        return requeue(find_to_change(str(self.path), "requeue"), now=now, exclude=exclude).job_id

    def events(self, *, since: datetime | float | None = None) -> list[Event]:
        """Return what happened to the run and who did what, oldest first.

        Each is of a class of `zslurm.run.events`, with `time`, `describe()` and `row`, its fields as a dictionary.

        Args:
            since: only events since this time.
        """
        from zslurm.run.events.event import from_row
        from zslurm.run.events.event_log import EventLog

        earliest = since.timestamp() if isinstance(since, datetime) else since
        return [from_row(row) for _, row in EventLog([self._run]).news(since=earliest)]

    def metrics(self) -> Metrics:
        """Return the numbers of the run: `steps["loss"]` is a column, `frame()` a pandas DataFrame.

        Raises:
            ZslurmError: they cannot be read.
        """
        from zslurm.run.metrics.columns import read_metrics

        return read_metrics(self.path)

    def checkpoints(self) -> list[Listing]:
        """Return the run's checkpoints, the newest first; incomplete ones have a `reason`.

        Raises:
            CheckpointError: they cannot be listed.
        """
        from zslurm.checkpoint_tools import list_checkpoints

        return list_checkpoints(self._run.checkpoints)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Open the checkpoint of a step, or the newest one that is complete.

        Raises:
            NotFound: there is none.
            CheckpointError: it is damaged.
        """
        from zslurm.api.checkpoint import Checkpoint
        from zslurm.checkpoint_tools.format.layout import step_name

        if step is None:
            return Checkpoint.open(self.path)
        return Checkpoint.open(self._run.checkpoints / step_name(step))

    def __repr__(self) -> str:
        job = f", job {self.job_id}" if self.job_id is not None else ""
        return f"Run({str(self.path)!r}{job})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def _repr_html_(self) -> str:
        """Show the state of the run in a notebook."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._facts())
        return f"<table>{rows}</table>"

    def _facts(self) -> Iterator[tuple[str, str]]:
        state = self.status()
        yield "run", self.name
        yield "state", f"{state.state}{f' ({state.reason})' if state.reason else ''}"
        for name in ("job_id", "nodes", "checkpoint_step"):
            if (value := getattr(state, name)) is not None:
                yield name.replace("_", " "), str(value)
        if state.step is not None:
            yield "step", f"{state.step}{f' of {state.total_steps}' if state.total_steps else ''}"
        if state.loss is not None:
            yield "loss", f"{state.loss:.4f}"


def load_run(reference: StrPath) -> Run:
    """Return the run that a name, the path of its directory, or a job id means.

    Raises:
        NotFound: there is none; the message suggests the nearest name.
    """
    return Run(find(str(reference)))


def runs() -> list[Run]:
    """Return your runs, as `zslurm status` lists them."""
    return [Run(run) for run in known_runs()]

"""`zslurm eval`: score a model on tasks."""

from __future__ import annotations

import errno
import json as jsonlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from zslurm.checkpoint_tools.format.layout import step_of
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.checkpoint.devices import Device, Dtype, choose_device
from zslurm.cli.checkpoint.options import Context, RopeBase, TokenizerFile, tokenizer_for
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, run_locally_or_as_job
from zslurm.cli.terminal.table import print_table
from zslurm.cluster.site import load_site
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.run.checkpoints import find_weights
from zslurm.run.events import Scored
from zslurm.run.events.by_user import record_by_user
from zslurm.run.run_dir import RunDir
from zslurm.train.evaluation.tasks.questions import questions_of
from zslurm.train.evaluation.tasks.scores import Result, as_metrics
from zslurm.train.evaluation.tasks.task import load_tasks, shipped
from zslurm.train.hub import Overrides, open_weights

if TYPE_CHECKING:
    from zslurm.job.evaluation_step import Step


def complete_tasks(incomplete: str) -> list[str]:
    """Return the tasks that are shipped."""
    return [name for name in shipped() if name.startswith(incomplete)]


def eval(
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CKPT",
            help="A run (its newest checkpoint), a checkpoint's directory, or a folder in transformers' format.",
        ),
    ],
    more: Annotated[list[str] | None, Argument(metavar="[FILE]...", help="More tasks.")] = None,
    tasks: Annotated[
        list[str] | None,
        Option(
            "--tasks",
            metavar="FILE",
            help="Task files, or names of shipped tasks; several as words or with commas.",
            autocompletion=complete_tasks,
        ),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Documents of each task at most.")] = None,
    batch: Annotated[int, Option(min=1, help="Prompts that are continued at one time, on each rank.")] = 32,
    seed: Annotated[int, Option(min=0, help="Of draws, where a task has any.")] = 0,
    out: Annotated[Path | None, Option(metavar="FILE", help="Also write the results there, as JSON.")] = None,
    samples: Annotated[
        Path | None, Option(metavar="FILE", help="Write each question with its answers there, as JSON lines.")
    ] = None,
    dtype: Annotated[Dtype | None, Option(help="Compute in this format; default: the weights' own.")] = None,
    device: Annotated[Device, Option(help="cuda is also torch's name for AMD GPUs.")] = Device.AUTO,
    ranks: Annotated[
        int, Option(min=1, help="Processes, on GPUs one for each, that divide the questions; of each node.")
    ] = 1,
    nodes: Annotated[int, Option(min=1, help="Nodes: of the job of --slurm, or of the one that you are in.")] = 1,
    tokenizer: TokenizerFile = None,
    rope_base: RopeBase = None,
    context: Context = None,
    slurm: Annotated[bool, Option("--slurm", help="Run it as a Slurm job, and follow it.")] = False,
    time: Annotated[
        str | None,
        Option(metavar="LIMIT", help="With --slurm: limit of the job, such as 30 (minutes) or 2:00:00."),
    ] = None,
    json: Json = False,
) -> None:
    """Score a model on tasks: multiple choice, exact match, perplexity, pass@k.

    Example: zslurm eval my-run --tasks arithmetic python-completion
    """
    inside = "SLURM_JOB_ID" in os.environ
    if time is not None and not slurm and not inside:
        raise ConfigError("--time is the limit of the job of --slurm; leave it out without")
    references = [name for word in [*(tasks or []), *(more or [])] for name in word.split(",") if name]
    if not references:
        raise ConfigError(f"--tasks is missing: task files, or of the shipped tasks: {', '.join(shipped())}")
    path = find_weights(checkpoint)
    for file in (out, samples):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no such folder")
        if file is not None and file.is_dir():
            raise ConfigError(f"{file}: is a directory; name a file")
    with as_user_errors():
        loaded = load_tasks(references)
        if slurm:  # what is wrong with documents shows before the job waits in the queue
            for task in loaded:
                questions_of(task, limit)
    run_locally_or_as_job(slurm, workers_option=None, nodes=nodes, gpus=ranks, time_limit=time)
    if nodes > 1 and not inside:
        raise ConfigError(f"--nodes {nodes} needs --slurm, or a job of so many nodes around this command")
    with as_user_errors():
        from zslurm.train.evaluation.on_ranks import Request, results_of, score_weights  # imports torch
        from zslurm.train.evaluation.scoring import PreparedTask

        prepared = [PreparedTask(task, limit) for task in loaded]
        with open_weights(path, Overrides(rope_base, context)) as weights:
            files, settings = tokenizer_for(weights, tokenizer), weights.settings
        if files is None:
            raise ConfigError(f"{path}: has no tokenizer; name one with --tokenizer")
        if settings.rope_base is None or settings.context is None:
            raise ConfigError(f"{path}: is in no run; pass --rope-base and --context")
        request = Request(
            path.absolute(),
            tuple(references),
            files,
            str(dtype or settings.dtype or "fp32"),
            choose_device(device, ranks),
            settings.rope_base,
            settings.context,
            batch,
            limit,
            seed,
        )
        if nodes > 1:
            from zslurm.job.evaluation_step import received_from_step

            found = results_of(prepared, received_from_step(request, len(prepared), _step(nodes, ranks)))
        else:
            found = score_weights(request, prepared, ranks)
        report = _Report(path, request.dtype, out, samples)
        reason = report.collect(found)
    _record(path, report.results)
    if json:
        print_json(report.body)
    else:
        print_table(("task", "metric", "score", "standard error"), report.rows())
    if reason is not None:
        say(f"not complete: {reason}; {len(report.results)} of {counted(len(prepared), 'task')} scored")
        raise typer.Exit(Exit.INTERRUPTED)


def _step(nodes: int, ranks: int) -> Step:
    """Return the step of the ranks: as many GPUs of each node as it has ranks, where nodes have any."""
    from zslurm.job.evaluation_step import Step

    gpus = load_site().cluster.gpu_request_of(ranks)
    return Step(nodes, ranks, (f"--gpus-per-node={gpus}", "--gpu-bind=none") if gpus else ())


class _Report:
    """The results so far. The files that were asked for hold them at any time.

    Attributes:
        results: of the tasks that are scored.
        body: the same as JSON has it.
    """

    def __init__(self, weights: Path, dtype: str, out: Path | None, samples: Path | None) -> None:
        self._out, self._samples, self._lines = out, samples, list[str]()
        self.results: list[Result] = []
        self.body: dict[str, Any] = {"weights": str(weights), "dtype": dtype, "complete": False, "results": []}
        self._check_files()

    def collect(self, found: Iterator[tuple[Result, list[dict[str, Any]]]]) -> str | None:
        """Take all results; returns why it ended before, where some are there and the time was over.

        Raises:
            TrainError: a rank failed; the files hold what was scored before.
            ZslurmError: the time was over before anything was scored.
            typer.Abort: so it was at Ctrl-C.
        """
        from zslurm.job.evaluation_step import OutOfTime

        try:
            with _interrupted_by_sigterm():
                for result, asked in found:
                    self._add(result, asked)
        except (KeyboardInterrupt, OutOfTime) as error:
            if self.results:
                self._write(last=True)
                return str(error) or "it was interrupted"
            if str(error):
                raise ZslurmError(f"nothing was scored: {error}") from None
            raise typer.Abort from None
        self.body["complete"] = True
        self._write(last=True)
        return None

    def rows(self) -> list[tuple[str, ...]]:
        """Return a line for each score."""
        return [
            (each.task, name, f"{value:.4f}", "-" if (error := each.stderr[name]) is None else f"{error:.4f}")
            for each in self.results
            for name, value in each.metrics.items()
        ]

    def _check_files(self) -> None:
        """Show before anything is computed that a file cannot be written; one of an earlier run stays as it is.

        Raises:
            ZslurmError: it cannot.
        """
        for file in filter(None, (self._out, self._samples)):
            if not file.exists():
                _write(file, jsonlib.dumps(self.body, indent=1) + "\n" if file == self._out else "")
            elif not os.access(file, os.W_OK):
                raise ZslurmError(f"{file}: cannot be written: {os.strerror(errno.EACCES)}")

    def _add(self, result: Result, asked: list[dict[str, Any]]) -> None:
        self.results.append(result)
        self.body["results"].append(result.fields())
        if self._samples is not None:
            self._lines += [jsonlib.dumps({"task": result.task, **line}, ensure_ascii=False) for line in asked]
        say(
            f"{result.task}: {counted(result.documents, 'document')}, "
            f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s"
        )
        self._write()

    def _write(self, *, last: bool = False) -> None:
        """Write the files; what is none, such as /dev/stdout, at last alone."""
        texts = {self._out: jsonlib.dumps(self.body, indent=1) + "\n"}
        texts[self._samples] = "".join(f"{line}\n" for line in self._lines)
        for file, text in texts.items():
            if file is not None and (last or file.is_file() or not file.exists()):
                _write(file, text)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt where SIGTERM comes, as it does at the time limit of a job; once is enough."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt("it was ended by SIGTERM, as at the time limit of a job")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record(path: Path, results: list[Result]) -> None:
    """Record scores in the events of the run that a checkpoint is in, where it is in one and can be written to."""
    folder = path.absolute().parent
    run = RunDir(folder.parent)
    if run.checkpoints != folder or not run.config.is_file():
        return
    found = as_metrics(results)
    scored = Scored(checkpoint=path.name, step=step_of(path.name), scores=found["scores"], stderr=found["stderr"])
    try:
        record_by_user(run, scored)
    except ZslurmError as error:
        say(f"note: the run's events do not have these scores: {error}")


def _write(file: Path, text: str) -> None:
    """Write a result that was asked for.

    Raises:
        ZslurmError: it cannot be written.
    """
    try:
        if file.is_file():
            write_atomically(file, text)
        else:  # a new one, or no file at all, such as /dev/stdout
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ZslurmError(f"{file}: cannot be written: {error.strerror}") from error

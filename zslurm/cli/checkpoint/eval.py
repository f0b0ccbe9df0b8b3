"""`zslurm eval`: score a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import errno
import json as jsonlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from zslurm.checkpoint_tools.format.layout import step_of
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.checkpoint.checkpoint_options import ComputeDevice, TokenizerFile, choose_device, tokenizer_for
from zslurm.cli.errors import as_user_errors
from zslurm.cli.help import MORE
from zslurm.cli.options import Json, run_locally_or_as_job
from zslurm.cli.terminal.table import print_table
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit, ZslurmError
from zslurm.core.extras import require
from zslurm.core.files import write_atomically
from zslurm.run.checkpoints import find_weights
from zslurm.run.events import Scored
from zslurm.run.events.by_user import record_by_user
from zslurm.run.run_dir import RunDir
from zslurm.slurm.environment import own_job_id
from zslurm.train.evaluation.scores import TaskResult, as_metrics
from zslurm.train.hub import open_weights

if TYPE_CHECKING:
    from zslurm.train.evaluation.harness import HarnessTask
    from zslurm.train.evaluation.on_ranks import ScoringRequest
    from zslurm.train.evaluation.scoring import Ask


def eval(
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CKPT",
            help="A run (its newest checkpoint), a checkpoint's directory, or a folder in transformers' format.",
        ),
    ],
    more: Annotated[list[str] | None, Argument(metavar="[TASK]...", help="More tasks.")] = None,
    tasks: Annotated[
        list[str] | None,
        Option(
            "--tasks",
            metavar="TASK",
            help="Tasks of lm-evaluation-harness by name (mmlu_* takes all that match) or as YAML files; several "
            "as words or with commas.",
        ),
    ] = None,
    include_path: Annotated[
        Path | None, Option(metavar="DIR", help="A folder with more tasks.", rich_help_panel=MORE)
    ] = None,
    num_fewshot: Annotated[
        int | None, Option(min=0, help="Examples before each question; default: the tasks' own.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Documents of each task at most.")] = None,
    run_code: Annotated[
        bool, Option("--run-code", help="Allow tasks that run the programs that the model writes.")
    ] = False,
    out: Annotated[Path | None, Option(metavar="FILE", help="Also write the results there, as JSON.")] = None,
    samples: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Write each question with its answers there, as JSON lines.", rich_help_panel=MORE
        ),
    ] = None,
    ranks: Annotated[
        int, Option(min=1, help="Processes, on GPUs one for each, that divide the questions; of each node.")
    ] = 1,
    nodes: Annotated[int, Option(min=1, help="Nodes: of the job of --slurm, or of the one that you are in.")] = 1,
    slurm: Annotated[bool, Option("--slurm", help="Run it as a Slurm job, and follow it.")] = False,
    time: Annotated[
        str | None,
        Option(
            metavar="LIMIT",
            help="With --slurm: limit of the job, such as 30 (minutes) or 2:00:00.",
            rich_help_panel=MORE,
        ),
    ] = None,
    tokenizer: TokenizerFile = None,
    json: Json = False,
) -> None:
    """Score a model on tasks of lm-evaluation-harness.

    Example: zslurm eval my-run --tasks hellaswag,arc_easy --limit 100
    """
    inside = own_job_id() is not None
    if time is not None and not slurm and not inside:
        raise ConfigError("--time is the limit of the job of --slurm; leave it out without")
    references = [name for word in [*(tasks or []), *(more or [])] for name in word.split(",") if name]
    if not references:
        raise ConfigError("--tasks is missing: names of tasks of lm-evaluation-harness, or task files")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path}: there is no such folder")
    path = find_weights(checkpoint)
    for file in (out, samples):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no such folder")
        if file is not None and file.is_dir():
            raise ConfigError(f"{file}: is a directory; name a file")
    if nodes > 1 and not inside and not slurm:
        raise ConfigError(f"--nodes {nodes} needs --slurm, or a job of so many nodes around this command")
    require("lm_eval")
    with as_user_errors(), _stdout_for_results():
        from zslurm.train.evaluation.harness import load_tasks  # takes seconds

        # Before a job waits in the queue as well: errors show, and documents are fetched if nodes have no network.
        loaded = load_tasks(references, include_path=include_path, num_fewshot=num_fewshot, run_code=run_code)
    run_locally_or_as_job(slurm, workers_option=None, nodes=nodes, gpus=ranks, time_limit=time)
    with as_user_errors():
        from zslurm.train.evaluation.on_ranks import ScoringRequest, local_answers  # imports torch

        with open_weights(path) as weights:
            files, settings = tokenizer_for(weights, tokenizer), weights.settings
        if files is None:
            raise ConfigError(f"{path}: has no tokenizer; name one with --tokenizer")
        if settings.rope_base is None or settings.context is None:
            raise ConfigError(
                f"{path}: is in no run, so its RoPE base or context is not known; export it with them (zslurm "
                "checkpoint export --rope-base --context), and score the export"
            )
        device = choose_device(ComputeDevice.AUTO, ranks)
        format_ = settings.dtype or "fp32"
        request = ScoringRequest(path.absolute(), files, format_, device, settings.rope_base, settings.context)
        report = _Report(path, request.dtype, out, samples)
        asking = local_answers(request, ranks)
        if nodes > 1:
            from zslurm.job.evaluation_step import answers_of_step
            from zslurm.job.ranks_step import step_of

            asking = answers_of_step(request, step_of(nodes, ranks))
        reason = report.collect(_scored(loaded, request, limit, asking))
    _record(path, report.results)
    if json:
        print_json(report.body)
    else:
        print_table(("task", "metric", "score", "standard error"), report.rows())
    if reason is not None:
        scored = len({task_result.task for task_result in report.results})
        say(f"not complete: {reason}; {counted(scored, 'task')} scored")
        raise typer.Exit(Exit.INTERRUPTED)


def _scored(
    tasks: list[HarnessTask], request: ScoringRequest, limit: int | None, asking: AbstractContextManager[Ask]
) -> Iterator[_TaskScores]:
    """Yield the scores of each task, its samples, the tokens that were computed for it and the seconds.

    Raises:
        DataError: a question cannot be asked.
        TrainError: a rank failed.
    """
    from zslurm.train.evaluation.harness import score
    from zslurm.train.evaluation.text_model import TextModel

    coder = request.coder()
    with asking as ask:
        for task in tasks:
            texts, started = TextModel(coder, request.context, ask), monotonic()
            with _stdout_for_results():
                results, lines = score(task, texts, limit=limit)
            yield _TaskScores(task.reference, results, lines, texts.tokens, monotonic() - started)


class _TaskScores(NamedTuple):
    """What was found about one reference: its tasks and groups, its samples, and how long that took."""

    reference: str
    results: list[TaskResult]
    samples: list[dict[str, Any]]
    tokens: int
    seconds: float


@contextmanager
def _stdout_for_results() -> Iterator[None]:
    """Keep what the harness prints from stdout, and its progress from a stderr that is no terminal."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        shown = sys.stderr if sys.stderr.isatty() else nowhere
        with redirect_stdout(shown), redirect_stderr(shown):
            yield


class _Report:
    """The results so far. The files that were asked for hold them at any time.

    Attributes:
        results: of the tasks that are scored.
        body: the same as JSON has it.
    """

    def __init__(self, weights: Path, dtype: str, out: Path | None, samples: Path | None) -> None:
        self._out, self._samples, self._lines = out, samples, list[str]()
        self.results: list[TaskResult] = []
        self.body: dict[str, Any] = {"weights": str(weights), "dtype": dtype, "complete": False, "results": []}
        self._check_files()

    def collect(self, found: Iterator[_TaskScores]) -> str | None:
        """Take all results; returns why it ended before, if some are there and the time was over.

        Raises:
            TrainError: a rank failed; the files hold what was scored before.
            ZslurmError: the time was over before anything was scored.
            typer.Abort: so it was at Ctrl-C.
        """
        from zslurm.job.ranks_step import OutOfTime

        try:
            with _interrupted_by_sigterm():
                for scored in found:
                    self._add(scored)
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
            (
                task_result.task,
                name,
                f"{value:.4f}",
                "-" if (error := task_result.stderr[name]) is None else f"{error:.4f}",
            )
            for task_result in self.results
            for name, value in task_result.metrics.items()
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

    def _add(self, scored: _TaskScores) -> None:
        self.results += scored.results
        self.body["results"] += [result.fields() for result in scored.results]
        if self._samples is not None:
            self._lines += [jsonlib.dumps(line, ensure_ascii=False, default=str) for line in scored.samples]
        rate = scored.tokens / max(scored.seconds, 1e-9)
        say(f"{scored.reference}: {counted(scored.tokens, 'token')}, {rate:,.0f} tokens/s")
        self._write()

    def _write(self, *, last: bool = False) -> None:
        """Write the files; a path that is no regular file, such as /dev/stdout, comes last."""
        texts = {self._out: jsonlib.dumps(self.body, indent=1) + "\n"}
        texts[self._samples] = "".join(f"{line}\n" for line in self._lines)
        for file, text in texts.items():
            if file is not None and (last or file.is_file() or not file.exists()):
                _write(file, text)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt if SIGTERM comes, as it does at the time limit of a job; once is enough."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt("it was ended by SIGTERM, as at the time limit of a job")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record(path: Path, results: list[TaskResult]) -> None:
    """Record scores in the events of the checkpoint's run, if it has one that can be written to."""
    folder = path.absolute().parent
    run = RunDir(folder.parent)
    if run.checkpoints != folder or not run.config.is_file():
        return
    metrics = as_metrics(results)
    scored = Scored(
        checkpoint=path.name, step=step_of(path.name), scores=metrics["scores"], stderr=metrics["stderr"]
    )
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

"""`zslurm eval`: score a model on tasks."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from zslurm.checkpoint_tools.format.layout import step_of
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.checkpoint.devices import Device, Dtype, choose_device
from zslurm.cli.checkpoint.options import Context, RopeBase, TokenizerFile, tokenizer_for
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.cli.terminal.table import print_table
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.run.checkpoints import find_weights
from zslurm.run.events.by_user import record_by_user
from zslurm.run.run_dir import RunDir
from zslurm.train.evaluation.tasks.scores import Result, as_metrics
from zslurm.train.evaluation.tasks.task import load_tasks, shipped
from zslurm.train.hub import Overrides, open_weights


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
    ranks: Annotated[int, Option(min=1, help="Processes, on GPUs one for each, that divide the questions.")] = 1,
    tokenizer: TokenizerFile = None,
    rope_base: RopeBase = None,
    context: Context = None,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Score a model on tasks: multiple choice, exact match, perplexity, pass@k.

    Example: zslurm eval my-run --tasks arithmetic python-completion
    """
    run_locally_or_as_job(slurm, workers_option=None, gpus=ranks)
    references = [name for word in [*(tasks or []), *(more or [])] for name in word.split(",") if name]
    if not references:
        raise ConfigError(f"--tasks is missing: task files, or of the shipped tasks: {', '.join(shipped())}")
    path = find_weights(checkpoint)
    for file in (out, samples):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no such folder")
    with as_user_errors():
        from zslurm.train.evaluation.on_ranks import Request, score_weights  # imports torch
        from zslurm.train.evaluation.scoring import PreparedTask
        from zslurm.train.parallel.world import DTYPES

        prepared = [PreparedTask(task, limit) for task in load_tasks(references)]
        with open_weights(path, Overrides(rope_base, context)) as weights:
            files, settings = tokenizer_for(weights, tokenizer), weights.settings
        if files is None:
            raise ConfigError(f"{path}: has no tokenizer; name one with --tokenizer")
        if settings.rope_base is None or settings.context is None:
            raise ConfigError(f"{path}: is in no run; pass --rope-base and --context")
        format_ = dtype or settings.dtype or "fp32"
        request = Request(
            path,
            tuple(references),
            files,
            DTYPES[format_],
            choose_device(device, ranks),
            settings.rope_base,
            settings.context,
            batch,
            limit,
            seed,
        )
        results = []
        lines: list[dict[str, Any]] = []
        for result, asked in score_weights(request, prepared, ranks):
            results.append(result)
            lines += [{"task": result.task, **line} for line in asked]
            say(
                f"{result.task}: {counted(result.documents, 'document')}, "
                f"{result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s"
            )
    _record(path, results)
    body = {"weights": str(path), "dtype": str(format_), "results": [each.fields() for each in results]}
    _write(out, jsonlib.dumps(body, indent=1) + "\n")
    _write(samples, "".join(jsonlib.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if json:
        print_json(body)
        return
    rows = [
        (each.task, name, f"{value:.4f}", "-" if (error := each.stderr[name]) is None else f"{error:.4f}")
        for each in results
        for name, value in each.metrics.items()
    ]
    print_table(("task", "metric", "score", "standard error"), rows)


def _record(path: Path, results: list[Result]) -> None:
    """Record scores in the events of the run that a checkpoint is in, where it is in one and can be written to."""
    folder = path.absolute().parent
    run = RunDir(folder.parent)
    if run.checkpoints != folder or not run.config.is_file():
        return
    found = as_metrics(results)
    fields = {"checkpoint": path.name, "step": step_of(path.name), "scores": found["scores"]}
    try:
        record_by_user(run, "score", **fields, stderr=found["stderr"])
    except ZslurmError as error:
        say(f"note: the run's events do not have these scores: {error}")


def _write(file: Path | None, text: str) -> None:
    """Write a result that was asked for.

    Raises:
        ZslurmError: it cannot be written.
    """
    if file is None:
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ZslurmError(f"{file}: cannot be written: {error.strerror}") from error

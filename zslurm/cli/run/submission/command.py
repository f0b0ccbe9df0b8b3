"""What `zslurm submit` does with its options: one run, a sweep, or a dry run."""

from __future__ import annotations

from json import dumps, loads

import typer

from zslurm.cli.run.follow import follow
from zslurm.cli.run.submission.dry_run import describe
from zslurm.cli.run.submission.options import SubmitOptions
from zslurm.cli.run.submission.sweep import show_sweep, submit_sweep
from zslurm.config.load import Resolved
from zslurm.core.console import print_json, say
from zslurm.run.checkpoints import find_checkpoint
from zslurm.submit.options import assign, dependency, sbatch_flags
from zslurm.submit.resolve import resolve_run
from zslurm.submit.submit import submit
from zslurm.submit.sweep import members

_OF_SLURM = ("nodes", "spares", "time", "partition", "account", "qos", "nodelist", "exclude")
"""Options that are keys of the section `slurm`."""


def submit_run(options: SubmitOptions) -> None:
    """Submit a run, a sweep, or show what would be submitted.

    Raises:
        typer.Exit: the run that was waited for has come to rest; with its exit code.
        ZslurmError: the run was refused.
    """
    if options.sweep or options.sweep_file is not None:
        _submit_sweep(options)
        return
    if options.max_concurrent is not None:
        raise typer.BadParameter("--max-concurrent limits a sweep; there is no --sweep here")
    resolved = _resolved(options, _overrides(options))
    if options.dry_run:
        print(describe(resolved, new=options.new, as_json=options.json), end="")
        return
    done = submit(resolved.spec, new=options.new)
    name = done.run.name
    if options.quiet:
        print(done.job_id)
    elif options.json:
        print_json({"job_id": done.job_id, "run_dir": str(done.run.path), "continued": done.continued})
    else:
        what = "continued" if done.continued else "submitted"
        say(f"{what} {name} as job {done.job_id}; run directory {done.run.path}")
        if not options.wait:
            say(f"follow it with: zslurm logs -f {name}    state: zslurm status {name}")
        for line in (*(f"changed: {key}" for key in done.changed), *(f"note: {note}" for note in done.notes)):
            say(line)
    if options.wait:
        raise typer.Exit(follow(done.run, done.job_id))


def _resolved(options: SubmitOptions, overrides: list[str]) -> Resolved:
    """Resolve the run file, or the program in its place.

    Raises:
        ConfigError, NotFound: see `resolve_run`.
    """
    program = _words(options.program) if options.program is not None else ()
    if options.run_file is None and not program:
        raise typer.BadParameter("give a RUN_FILE, or a program behind `--`: zslurm submit -- python train.py")
    return resolve_run(options.run_file, cluster=options.cluster, overrides=overrides, program=program)


def _words(program: str) -> list[str]:
    """Return the words behind `--`, which commands.py hands over as JSON."""
    try:
        words = loads(program)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise typer.BadParameter("write the program behind `--`: zslurm submit -- python train.py")
    return words


def _overrides(options: SubmitOptions) -> list[str]:
    """Return the overrides of the run that the options are.

    Raises:
        ConfigError, NotFound: an option of sbatch, a dependency or the checkpoint is not valid.
    """
    flags = sbatch_flags(options.sbatch_options or [])
    if options.reservation is not None:
        flags["reservation"] = options.reservation
    if (waits_for := dependency(options.dependency or [])) is not None:
        flags["dependency"] = waits_for
    slurm = {name: value for name in _OF_SLURM if (value := getattr(options, name)) is not None}
    found = [
        *(options.overrides or []),
        *(assign(f"slurm.{name}", value, f"--{name}") for name, value in slurm.items()),
        *(assign(f"slurm.flags.{name}", value, f"--{name}") for name, value in flags.items()),
    ]
    if options.name is not None:
        found.append(assign("run.name", options.name, "--job-name"))
    if options.checkpoint is not None:
        found.append(f"checkpoint.resume_from={dumps(str(find_checkpoint(options.checkpoint).absolute()))}")
    if options.profile is not None:
        found.append(f"metrics.profile={options.profile}")
    return found


def _submit_sweep(options: SubmitOptions) -> None:
    if options.wait:
        raise typer.BadParameter("--wait follows one run; `zslurm status` shows a sweep's")
    overrides = _overrides(options)
    outcomes = submit_sweep(
        members(options.sweep or [], options.sweep_file),
        lambda more: _resolved(options, [*overrides, *more]).spec,
        max_concurrent=options.max_concurrent,
        new=options.new,
        dry_run=options.dry_run,
    )
    show_sweep(outcomes, quiet=options.quiet, as_json=options.json)

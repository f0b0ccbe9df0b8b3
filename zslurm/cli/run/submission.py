"""Submit one run, or a sweep of runs, as `zslurm submit` asks; or show what would be submitted.

Options become overrides of the run: everything that a run needs is in its configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.run.dry_run import describe
from zslurm.cli.run.follow import follow
from zslurm.cli.terminal.table import Column, print_table
from zslurm.config.layers import Override
from zslurm.config.load import Resolved
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, SlurmUnavailable, ZslurmError
from zslurm.run.checkpoints import find_checkpoint
from zslurm.run.index import find_run
from zslurm.run.state.run_state import last_job
from zslurm.slurm.sbatch_options import BY_NAME, OPTIONS, RESERVED
from zslurm.submit.resolve import resolve_run
from zslurm.submit.submit import Prepared, prepare, submit, submit_prepared
from zslurm.submit.sweep import SweepMember, member_name, members

_KEYS = {option.name: option.run_key for option in OPTIONS if option.typed} | {
    "spares": "slurm.spares",
    "checkpoint": "checkpoint.resume_from",
    "profile": "metrics.profile",
}
"""The key of a run file that an option of `zslurm submit` sets, by the option's long name."""


@dataclass(frozen=True)
class Request:
    """What a user wants to submit.

    Attributes:
        run_file: None if the run is a program.
        program: its words; empty if zslurm's own trainer trains.
        cluster: name of the profile; None for the one that applies.
        overrides: values that win over the files.
    """

    run_file: Path | None
    program: Sequence[str]
    cluster: str | None
    overrides: Sequence[Override]

    @classmethod
    def of(
        cls,
        run_file: Path | None,
        program: Sequence[str],
        *,
        cluster: str | None,
        overrides: Sequence[Override],
        options: Mapping[str, Any],
        flags: Sequence[str],
        dependencies: Sequence[str],
    ) -> Request:
        """Return the request that the options of the command line mean.

        Args:
            run_file: see `Request`.
            program: see `Request`.
            cluster: see `Request`.
            overrides: the values of `--set`.
            options: values of other options by long name; None for those that were not given.
            flags: long options of sbatch, as typed after `--`.
            dependencies: values of `--dependency`.

        Raises:
            BadParameter: there is neither a run file nor a program.
            ConfigError, NotFound: an option of sbatch, a dependency or the checkpoint is not valid.
        """
        options_given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if "checkpoint" in options_given:
            options_given["checkpoint"] = str(find_checkpoint(options_given["checkpoint"]).absolute())
        values = [Override.of(_KEYS[name], value, f"--{name}") for name, value in options_given.items()]
        more = sbatch_flags(flags)
        if (waits_for := dependency(dependencies)) is not None:
            more["dependency"] = waits_for
        values += [Override(("slurm", "flags", name), value, f"--{name}") for name, value in more.items()]
        if run_file is None and not program:
            raise typer.BadParameter("give a RUN_FILE, or a program behind `--`: zslurm submit -- python train.py")
        return cls(run_file, program, cluster, [*overrides, *values])

    def resolve(self, more: Sequence[Override] = ()) -> Resolved:
        """Resolve the run, under further overrides.

        Raises:
            ConfigError, NotFound: see `resolve_run`.
        """
        overrides = [*self.overrides, *more]
        return resolve_run(self.run_file, cluster=self.cluster, overrides=overrides, program=self.program)


def submit_run(request: Request, *, new: bool, dry_run: bool, wait: bool, quiet: bool, as_json: bool) -> None:
    """Submit a run, or show what would be submitted.

    Raises:
        typer.Exit: the run that was waited for has come to rest; with its exit code.
        ZslurmError: the run was refused.
    """
    resolved = request.resolve()
    if dry_run:
        print(describe(resolved, new=new, as_json=as_json), end="")
        return
    done = submit(resolved.spec, new=new)
    name = done.run.name
    if quiet:
        print(done.job_id)
    elif as_json:
        print_json({"job_id": done.job_id, "run_dir": str(done.run.path), "continued": done.continued})
    else:
        what = "continued" if done.continued else "submitted"
        say(f"{what} {name} as job {done.job_id}; run directory {done.run.path}")
        if not wait:
            say(f"follow it with: zslurm logs -f {name}    state: zslurm status {name}")
        for line in (*(f"changed: {key}" for key in done.changed), *(f"note: {note}" for note in done.notes)):
            say(line)
    if wait:
        raise typer.Exit(follow(done.run, done.job_id))


def submit_sweep(
    request: Request,
    sweeps: Sequence[str],
    file: Path | None,
    *,
    max_concurrent: int | None,
    new: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Submit every member of a sweep, or show all of them, and print what became of each.

    Raises:
        ConfigError: a member is not valid; none was submitted then.
        ZslurmError: some were not submitted.
    """
    outcomes = _submit_members(
        members(sweeps, file), request, max_concurrent=max_concurrent, new=new, dry_run=dry_run
    )
    _show_sweep(outcomes, quiet=quiet, as_json=as_json)


@dataclass(frozen=True)
class SubmissionOutcome:
    """What became of a member."""

    run: str
    values: dict[str, str]
    run_dir: Path
    job_id: str | None = None
    error: str | None = None


def _submit_members(
    found: Sequence[SweepMember], request: Request, *, max_concurrent: int | None, new: bool, dry_run: bool
) -> list[SubmissionOutcome]:
    """Submit every member, with `new` each from the start, with `dry_run` none.

    One that fails does not keep the others back; without an answer from Slurm all stop. Of `max_concurrent`
    members that may run at the same time, each waits until the one that many before it has ended.

    Raises:
        ConfigError: a member is not valid; none was submitted then.
    """
    base = request.resolve(found[0].overrides).spec.run.name
    named = [
        (member, [*member.overrides, Override(("run", "name"), member_name(base, member), "--sweep")])
        for member in found
    ]
    specs = [request.resolve(overrides).spec for _, overrides in named]
    if max_concurrent is not None and specs[0].cluster.launcher == "local":
        raise ConfigError(
            "--max-concurrent: only jobs of Slurm can wait for one another; here all members start at once"
        )
    ready = [prepare(spec, new=new) for spec in specs]
    outcomes: list[SubmissionOutcome] = []
    jobs: list[str] = []
    stopped: str | None = None
    for (member, overrides), prepared in zip(named, ready, strict=True):
        outcome = SubmissionOutcome(prepared.run.name, member.values, prepared.run.path, error=stopped)
        if not dry_run and stopped is None:
            try:
                if max_concurrent is not None and len(jobs) >= max_concurrent:
                    prepared = _after(jobs[-max_concurrent], prepared, request, overrides)
                jobs.append(submit_prepared(prepared).job_id)
                outcome = replace(outcome, job_id=jobs[-1])
            except ZslurmError as error:
                stopped = "not tried: Slurm does not answer" if isinstance(error, SlurmUnavailable) else None
                outcome = replace(outcome, error=str(error))
        outcomes.append(outcome)
    return outcomes


def _after(job_id: str, prepared: Prepared, request: Request, overrides: Sequence[Override]) -> Prepared:
    """Return the run, made to wait for the end of a job."""
    dependency = prepared.spec.slurm.flags.get("dependency")
    waits = f"{dependency},afterany:{job_id}" if isinstance(dependency, str) else f"afterany:{job_id}"
    waiting = Override(("slurm", "flags", "dependency"), waits, "--max-concurrent")
    return prepare(request.resolve([*overrides, waiting]).spec, new=prepared.start_over)


def _show_sweep(outcomes: Sequence[SubmissionOutcome], *, quiet: bool, as_json: bool) -> None:
    """Print every member with its job.

    Raises:
        ZslurmError: some were not submitted.
    """
    if as_json:
        print_json([vars(outcome) | {"run_dir": str(outcome.run_dir)} for outcome in outcomes])
    elif quiet:
        for outcome in outcomes:
            if outcome.job_id is not None:
                print(outcome.job_id)
    else:
        keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.values))
        rows = [
            [o.run, o.job_id or "-", *(o.values.get(key, "-") for key in keys), o.error or ""] for o in outcomes
        ]
        print_table(["run", "job", *keys, Column("error", "below")], rows)
    failed = [f"{outcome.run}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
    if failed:
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise ZslurmError(
            f"{len(failed)} of {counted(len(outcomes), 'member')} {'was' if len(failed) == 1 else 'were'} not "
            f"submitted: {'; '.join(failed[:3])}{more}"
        )


_DEPENDENCIES = "after afterany afterok afternotok afterburstbuffer aftercorr".split()
_TIMED_JOB = re.compile(r"\d+(_\d+)?(\+\d+)?")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


def dependency(jobs: Sequence[str]) -> str | None:
    """Return Slurm's form of `--dependency [TYPE:]JOB ...`; a job may be a run's name; all must hold.

    Raises:
        ConfigError: not a dependency.
        NotFound: no such run, or it was never submitted.
    """
    return ",".join(_dependency(job_text) for job_text in jobs) or None


def _dependency(given: str) -> str:
    if given == "singleton":
        return given
    kind, colon, job = given.partition(":")
    if not colon:
        kind, job = "afterok", given
    if kind not in _DEPENDENCIES:
        raise ConfigError(
            f"--dependency {given}: `{kind}` is no type of dependency; types: {', '.join(_DEPENDENCIES)}"
        )
    parts = job.split(":")
    return ":".join([kind, *(word if _TIMED_JOB.fullmatch(word) else _job_of(word, given) for word in parts)])


def _job_of(reference: str, given: str) -> str:
    """Return the Slurm job of a run that was submitted last."""
    run = find_run(reference)
    job = last_job(run)
    if job is None or job.launcher != "slurm":
        raise ConfigError(f"--dependency {given}: {run.name} has no Slurm job")
    return job.job_id


def sbatch_flags(words: Sequence[str]) -> dict[str, str | bool]:
    """Return the options of sbatch after `--` on the command line.

    Raises:
        ConfigError: a word is no long option, or an option that zslurm sets itself.
    """
    flags: dict[str, str | bool] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        match = _FLAG.fullmatch(word)
        if match is None:
            what = (
                "write the long form of the option" if word.startswith("-") else "options of sbatch begin with --"
            )
            raise ConfigError(f"{word}: not a long option of sbatch; {what}, e.g. -- --mail-type=END --exclusive")
        name, value = match[1], match[2]
        if name in RESERVED:
            option = BY_NAME[name]
            instead = f"; use {option.instead}" if option.instead else ""
            raise ConfigError(f"--{name}: zslurm sets it itself{instead}")
        if value is None and remaining and not remaining[0].startswith("-"):
            value = remaining.pop(0)
        flags[name] = True if value is None else value
    return flags

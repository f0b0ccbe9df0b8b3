"""`zslurm submit --sweep`: submit one run after the other, and print what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.terminal.table import Column, print_table
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json
from zslurm.core.errors import ConfigError, SlurmUnavailable, ZslurmError
from zslurm.submit.options import assign
from zslurm.submit.submit import Prepared, prepare, submit_prepared
from zslurm.submit.sweep import Member, member_name, settings_of

Resolve = Callable[[Sequence[str]], RunSpec]
"""Gives the run under further overrides."""


@dataclass(frozen=True)
class Outcome:
    """What became of a member."""

    run: str
    values: dict[str, str]
    run_dir: Path
    job_id: str | None = None
    error: str | None = None


def submit_sweep(
    found: Sequence[Member], resolve: Resolve, *, max_concurrent: int | None, new: bool, dry_run: bool
) -> list[Outcome]:
    """Submit every member, with `new` each from the start, with `dry_run` none.

    One that fails does not keep the others back; without an answer from Slurm all stop. Of `max_concurrent`
    members that may run at the same time, each waits until the one that many before it has ended.

    Raises:
        ConfigError: a member is not valid; none was submitted then.
    """
    base = resolve(found[0].settings).run.name
    named = [(member, [*member.settings, assign("run.name", member_name(base, member))]) for member in found]
    specs = [resolve(settings) for _, settings in named]
    if max_concurrent is not None and specs[0].cluster.launcher == "local":
        raise ConfigError(
            "--max-concurrent: only jobs of Slurm can wait for one another; here all members start at once"
        )
    ready = [prepare(spec, new=new) for spec in specs]
    outcomes: list[Outcome] = []
    jobs: list[str] = []
    stopped: str | None = None
    for (member, settings), prepared in zip(named, ready, strict=True):
        outcome = Outcome(prepared.run.name, settings_of(member), prepared.run.path, error=stopped)
        if not dry_run and stopped is None:
            try:
                if max_concurrent is not None and len(jobs) >= max_concurrent:
                    prepared = _after(jobs[-max_concurrent], prepared, resolve, settings)
                jobs.append(submit_prepared(prepared).job_id)
                outcome = replace(outcome, job_id=jobs[-1])
            except ZslurmError as error:
                stopped = "not tried: Slurm does not answer" if isinstance(error, SlurmUnavailable) else None
                outcome = replace(outcome, error=str(error))
        outcomes.append(outcome)
    return outcomes


def _after(job_id: str, prepared: Prepared, resolve: Resolve, settings: Sequence[str]) -> Prepared:
    """Return the run, made to wait for the end of a job."""
    given = prepared.spec.slurm.flags.get("dependency")
    waits = f"{given},afterany:{job_id}" if isinstance(given, str) else f"afterany:{job_id}"
    return prepare(resolve([*settings, assign("slurm.flags.dependency", waits)]), new=prepared.start_over)


def show_sweep(outcomes: Sequence[Outcome], *, quiet: bool, as_json: bool) -> None:
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

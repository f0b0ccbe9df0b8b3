"""`zslurm submit --sweep`: submit one run after the other, and report what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, print_table
from zslurm.core.errors import ConfigError, SlurmUnavailable, ZslurmError
from zslurm.submit.options import assign
from zslurm.submit.submit import Prepared, prepare, submit_prepared
from zslurm.submit.sweep import Member, member_name, settings_of

Resolve = Callable[[Sequence[str]], RunSpec]


@dataclass(frozen=True)
class Outcome:
    """What became of a member."""

    name: str
    values: dict[str, str]
    run_dir: Path
    job_id: str | None = None
    error: str | None = None


def submit_sweep(
    found: Sequence[Member], resolve: Resolve, *, max_concurrent: int | None, new: bool, dry_run: bool
) -> list[Outcome]:
    """Submit every member. One that fails does not keep the others back; without an answer from Slurm all stop.

    Args:
        found: the members.
        resolve: gives the run under further overrides.
        max_concurrent: how many may run at the same time: a member waits until the one that many before it has
            ended.
        new: start each over.
        dry_run: submit none.

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
        outcome = Outcome(prepared.run.name, settings_of(member), prepared.run.path)
        if dry_run or stopped is not None:
            outcomes.append(Outcome(outcome.name, outcome.values, outcome.run_dir, error=stopped))
            continue
        try:
            if max_concurrent is not None and len(jobs) >= max_concurrent:
                prepared = _after(jobs[-max_concurrent], prepared, resolve, settings)
            job_id = submit_prepared(prepared).job_id
        except ZslurmError as error:
            stopped = "not tried: Slurm does not answer" if isinstance(error, SlurmUnavailable) else None
            outcomes.append(Outcome(outcome.name, outcome.values, outcome.run_dir, error=str(error)))
        else:
            jobs.append(job_id)
            outcomes.append(Outcome(outcome.name, outcome.values, outcome.run_dir, job_id))
    return outcomes


def _after(job_id: str, prepared: Prepared, resolve: Resolve, settings: Sequence[str]) -> Prepared:
    """The run, made to wait for the end of a job."""
    given = prepared.spec.slurm.flags.get("dependency")
    waits = f"{given},afterany:{job_id}" if isinstance(given, str) else f"afterany:{job_id}"
    return prepare(resolve([*settings, assign("slurm.flags.dependency", waits)]), new=prepared.start_over)


def show_sweep(outcomes: Sequence[Outcome], *, quiet: bool, as_json: bool) -> None:
    """Print every member with its job.

    Raises:
        ZslurmError: some were not submitted.
    """
    if as_json:
        print_json([_facts(outcome) for outcome in outcomes])
    elif quiet:
        for outcome in outcomes:
            if outcome.job_id is not None:
                print(outcome.job_id)
    else:
        keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.values))
        rows = [
            [o.name, o.job_id or "-", *(o.values.get(key, "-") for key in keys), o.error or ""] for o in outcomes
        ]
        print_table(["run", "job", *keys, "error"], rows)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise ZslurmError(
            f"{len(failed)} of {counted(len(outcomes), 'member')} {'was' if len(failed) == 1 else 'were'} not "
            "submitted: "
            + "; ".join(f"{outcome.name}: {outcome.error}" for outcome in failed[:3])
            + (f"; and {len(failed) - 3} more" if len(failed) > 3 else "")
        )


def _facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "run": outcome.name,
        "job_id": outcome.job_id,
        "run_dir": str(outcome.run_dir),
        "values": outcome.values,
        "error": outcome.error,
    }

"""Options that several commands share."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from zslurm.core.errors import ConfigError
from zslurm.slurm.environment import own_job_id
from zslurm.train.niceness import BACKGROUND, lower_process

if TYPE_CHECKING:
    from zslurm.config.layers import Override
else:
    Override = Any  # Typer needs no class for what a parser returns, and help texts load no configuration

_HIGHEST_NICENESS = 19


def complete_runs(incomplete: str) -> list[tuple[str, str]]:
    """Return this user's runs with their job ids; job ids, once a digit is typed, with the run's name."""
    from zslurm.run.index import jobs  # as below: the options alone must not cost what completing them takes

    try:
        recent_jobs = jobs()
    except OSError:
        return []
    names = {job.run_dir.name: f"job {job.job_id}" for job in reversed(recent_jobs)}
    ids = {job.job_id: job.run_dir.name for job in recent_jobs} if incomplete[:1].isdigit() else {}
    return sorted((word, about) for word, about in (names | ids).items() if word.startswith(incomplete))


def complete_clusters(incomplete: str) -> list[str]:
    """Return the names of cluster profiles."""
    from zslurm.cluster.profile import LOCAL, profile_files

    try:
        names = {*profile_files(), LOCAL}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def complete_recipes(incomplete: str) -> list[str]:
    """Return the recipes that a run file can extend."""
    from zslurm.config.load import recipes

    return sorted(name for name in recipes() if name.startswith(incomplete))


def complete_templates(incomplete: str) -> list[str]:
    """Return the templates of job scripts, your own ones too."""
    from zslurm.submit.script.templates import own_templates, shipped_templates

    names = {name for name in (*own_templates(), *shipped_templates()) if not name.startswith("_")}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_checks(incomplete: str) -> list[tuple[str, str]]:
    """Return the checks of `zslurm doctor` with what they are about."""
    from zslurm.doctor.check import all_checks

    return [(check.name, check.about) for check in all_checks() if check.name.startswith(incomplete)]


def complete_tensors(incomplete: str) -> list[str]:
    """Return the tensors of the checkpoint that is typed already.

    Typer has read no argument if the last word is an option without its value: so the words are read.
    """
    from zslurm.checkpoint_tools import Checkpoint as Opened
    from zslurm.checkpoint_tools import CheckpointError
    from zslurm.core.errors import ZslurmError
    from zslurm.run.checkpoints import find_newest

    words = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()
    typed = [word for word in words[words.index("show") + 1 :] if word[0] != "-"] if "show" in words else []
    try:
        with Opened.open(find_newest(typed[0]), check_files=False) as opened:
            return [tensor.name for tensor in opened.manifest.tensors if tensor.name.startswith(incomplete)]
    except (IndexError, OSError, ZslurmError, CheckpointError):
        return []


def complete_keys(incomplete: str) -> list[tuple[str, str]]:
    """Return the keys of a run file with what they are, each with `=`; for those of phases the first phase's."""
    from zslurm.config.load import run_file_schema

    keys = _keys(run_file_schema(), "", "[0]" if "[" in incomplete else ".0")
    return [(f"{key}=", about) for key, about in keys if f"{key}=".startswith(incomplete)]


def _keys(
    schema: dict[str, Any], prefix: str, index: str, root: dict[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Return the leaves of a JSON schema as dotted keys; `index` is how the first item of a list is written."""
    root = schema if root is None else root
    keys_found: list[tuple[str, str]] = []
    for name, property_schema in schema.get("properties", {}).items():
        resolved, key = _resolved(property_schema, root), f"{prefix}{name}"
        items = _resolved(resolved.get("items", {}), root)
        if resolved.get("properties"):
            keys_found += _keys(resolved, f"{key}.", index, root)
        elif items.get("properties"):
            keys_found += _keys(items, f"{key}{index}.", index, root)
        else:
            keys_found.append((key, property_schema.get("description", "")))
    return keys_found


def _resolved(part: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and of several types that which is an object or a list."""
    while True:
        if "$ref" in part:
            part = root["$defs"][part["$ref"].rsplit("/", 1)[-1]]
        elif options := [option for name in ("anyOf", "oneOf", "allOf") for option in part.get(name, ())]:
            richer = [
                option for option in options if "$ref" in option or option.get("type") in ("object", "array")
            ]
            part = (richer or options)[0]
        else:
            return part


def complete_states(incomplete: str) -> list[str]:
    """Return the states of runs, for the last of those that are typed."""
    from zslurm.run.state.run_state import STATES

    head, comma, last = incomplete.rpartition(",")
    return [f"{head}{comma}{state}" for state in STATES if state.startswith(last)]


TIMES = "30m, 12h, 2d, or 2026-11-23T08:00"
"""Points of time as `parse_since` reads them."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_since(text: str) -> float:
    """Return the UNIX seconds of a local time, or of a duration before now.

    Raises:
        ConfigError: it is neither.
    """
    text = text.strip()
    if match := re.fullmatch(r"(\d{1,6})([smhdw])", text):
        return time.time() - int(match[1]) * _SECONDS[match[2]]
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise ConfigError(f"--since {text[:40]!r}: expected {TIMES}")


def parse_override(assignment: str) -> Override:
    """Return the override that `--set KEY=VALUE` means.

    Raises:
        ConfigError: the text is no assignment, or the value is not valid YAML.
    """
    from zslurm.config import layers  # help texts do not need it

    return layers.Override.parse(assignment)


_RUNS = "Names, directories or job ids"

RunFile = Annotated[
    Path,
    Argument(
        metavar="RUN_FILE", help="The YAML run file, or the name of a recipe.", autocompletion=complete_recipes
    ),
]
Run = Annotated[
    str, Argument(metavar="RUN", help="A run's name, its directory, or a job id.", autocompletion=complete_runs)
]
Runs = Annotated[list[str], Argument(metavar="RUN...", help=f"{_RUNS}.", autocompletion=complete_runs)]
SomeRuns = Annotated[
    list[str] | None,
    Argument(metavar="[RUN]...", help=f"{_RUNS}; default: all your runs.", autocompletion=complete_runs),
]
Cluster = Annotated[
    str | None,
    Option(
        metavar="NAME", help="Cluster profile; `local` trains on this machine.", autocompletion=complete_clusters
    ),
]
Set = Annotated[
    list[Override] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value, e.g. phases.0.lr=3e-4 (repeatable).",
        parser=parse_override,
        autocompletion=complete_keys,
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Follow = Annotated[bool, Option("-f", "--follow", help="Keep printing until the run has ended.")]
Slurm = Annotated[bool, Option("--slurm", help="Run it as a Slurm job of one node, and follow it.")]


def run_locally_or_as_job(
    slurm: bool,
    *,
    workers_option: str | None = "--workers",
    nodes: int = 1,
    gpus: int = 0,
    time_limit: str | None = None,
) -> None:
    """Continue in this process, with a lower priority; or run this command line as a job, and leave.

    The job has `nodes` nodes with `gpus` GPUs each, and a time limit in sbatch's form.

    Raises:
        typer.Exit: the job is over; with its exit code.
        ConfigError: $ZSLURM_NICE is no niceness.
    """
    if slurm:
        from zslurm.submit.as_job import JobShape, run_as_job  # all that a submission needs, as few commands do

        shape = JobShape(nodes, gpus, time_limit)
        raise typer.Exit(run_as_job(sys.argv[1:], workers_option=workers_option, shape=shape))
    lower_priority()


def lower_priority() -> None:
    """Lower this process's priority to $ZSLURM_NICE (default: 10), unless it runs in a Slurm job.

    Raises:
        ConfigError: $ZSLURM_NICE is no niceness.
    """
    niceness = os.environ.get("ZSLURM_NICE", "")
    if niceness and (not re.fullmatch("[0-9]{1,2}", niceness) or int(niceness) > _HIGHEST_NICENESS):
        raise ConfigError(f"ZSLURM_NICE={niceness}: expected a niceness from 0 to {_HIGHEST_NICENESS}")
    if own_job_id() is None:
        lower_process(int(niceness) if niceness else BACKGROUND)

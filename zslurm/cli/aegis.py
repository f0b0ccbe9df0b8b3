"""`zslurm aegis classify`: the diagnosis of a job's logs, in words and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.aegis.logs.classify import Diagnosis, Line
from zslurm.aegis.logs.classify import classify as classify_logs
from zslurm.aegis.logs.lines import chunks_of
from zslurm.aegis.notify.check import try_hooks
from zslurm.aegis.policy.replay import Replayed, read_events, settings_of
from zslurm.aegis.policy.replay import replay as replay_policy
from zslurm.aegis.supervisor.supervisor import supervise
from zslurm.checkpoint_tools.quantities import show_duration
from zslurm.cli.options import Cluster, Json, RunFile, Set, Slurm, run_locally_or_as_job
from zslurm.config.aegis import AegisSection
from zslurm.core.console import print_json, print_table
from zslurm.core.errors import NotFound
from zslurm.core.units import show_time
from zslurm.run.find import find
from zslurm.run.run_dir import open_run
from zslurm.slurm.hostlist import compress
from zslurm.submit.resolve import resolve_run

app = typer.Typer(help="The supervisor beside a run: what it does, and would do.", no_args_is_help=True)


@app.command("run")
def run_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.", show_default=False)],
) -> None:
    """Supervise a run's job from inside it, as its batch script does.

    Example: zslurm aegis run runs/my-run
    """
    raise typer.Exit(supervise(str(open_run(run_dir).path)))


@app.command()
def notify(run_file: RunFile, cluster: Cluster = None, overrides: Set = None, slurm: Slurm = False) -> None:
    """Send a sample event through the hooks of `aegis.notify`, and say whether they took it.

    With --slurm from a compute node, which may reach less of the network than this machine.

    Example: zslurm aegis notify run.yaml --slurm
    """
    if slurm:
        run_locally_or_as_job(True, workers_option=None)
    for line in try_hooks(resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec):
        print(line)


@app.command()
def replay(
    events: Annotated[
        str,
        typer.Argument(
            metavar="EVENTS_OR_RUN",
            help="An events.jsonl, or a run's name, directory or job id.",
            show_default=False,
        ),
    ],
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show what was done about each attempt of a run, and what another policy would have done.

    The policy is that of the run, changed by --set aegis.KEY=VALUE. Each attempt is decided with the history that
    it really had.

    Example: zslurm aegis replay my-run --set aegis.retries=1
    """
    given = Path(events)
    path = given if given.is_file() else find(events).events
    settings = settings_of(path.with_name("config.json"), overrides or [])
    found = replay_policy(read_events(path), settings)
    if json:
        print_json(replay_as_json(path, settings, found))
    else:
        print_table(REPLAY_COLUMNS, [as_row(one) for one in found])


@app.command("classify")
def classify(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES... | -", help="Logs of one job, also packed ones.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Tell from logs what went wrong: the root, what followed from it, who is suspect and what to do.

    Works on the logs of any job: output of ranks and of srun, dmesg, journalctl, other trainers' logs.

    Example: zslurm aegis classify slurm-4242.out dmesg.txt
    """
    diagnosis = diagnose(files)
    if json:
        print_json(classified_as_json(diagnosis))
        return
    for line in headline(diagnosis):
        print(line)
    if diagnosis.lines:
        print()
        print_table(CLASSIFY_COLUMNS, rows(diagnosis))


CLASSIFY_COLUMNS = ("time", "class", "role", "lines", "where", "first line")
_READ = 1 << 20


def diagnose(files: Sequence[str]) -> Diagnosis:
    """What the logs tell.

    Args:
        files: paths; `-` is standard input.

    Raises:
        NotFound: there is no such file.
    """
    for name in files:
        if name != "-" and not Path(name).exists():
            raise NotFound(f"{name}: no such file; name log files, or - for standard input")
        if name != "-" and Path(name).is_dir():
            raise NotFound(f"{name}: is a directory; name the files in it")
    return classify_logs((name, _standard_input() if name == "-" else chunks_of(Path(name))) for name in files)


def _standard_input() -> Iterator[bytes]:
    yield from iter(lambda: sys.stdin.buffer.read(_READ), b"")


def classified_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "lines": [_line_as_json(line) for line in diagnosis.lines],
        "root": None if diagnosis.root is None else _line_as_json(diagnosis.root) | {"certain": diagnosis.certain},
        "suspect": asdict(diagnosis.suspect),
        "advice": diagnosis.advice,
        "left_out": diagnosis.left_out,
    }


def _line_as_json(line: Line) -> dict[str, Any]:
    match = line.match
    return {
        "file": line.file,
        "number": line.finding.number,
        "class": match.kind,
        "role": match.role,
        "scope": match.scope,
        "node": match.node,
        "gpu": match.gpu,
        "nic": match.nic,
        "rank": match.rank,
        "time": line.finding.time,
        "line": line.finding.text,
    }


def headline(diagnosis: Diagnosis) -> list[str]:
    """The root, its line and the advice; or that nothing was found."""
    root = diagnosis.root
    if root is None:
        return ["no fault found" + (", only advisories:" if diagnosis.lines else "")]
    kind = (
        root.match.kind
        if diagnosis.certain
        else f"{root.match.kind} (a consequence; its cause is not in these logs)"
    )
    place = ", ".join(f"{name} {value}" for name, value in asdict(diagnosis.suspect).items() if value is not None)
    return [
        f"root: {kind}" + (f": {place}" if place else ""),
        f"  {root.file}:{root.finding.number}: {root.finding.text}",
        f"  {diagnosis.advice}",
    ]


def rows(diagnosis: Diagnosis) -> list[list[str]]:
    """The timeline: lines that say the same in one row, in the order in which each was said first."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in diagnosis.lines:
        groups.setdefault((line.match.kind, line.match.role), []).append(line)
    return [_row(kind, role, lines, diagnosis.root) for (kind, role), lines in groups.items()]


def _row(kind: str, role: str, lines: list[Line], root: Line | None) -> list[str]:
    first = lines[0]
    when = show_time(first.when, "%m-%d %H:%M:%S") if first.when is not None else "-"
    shown = "root" if any(line is root for line in lines) else {"root": "later root"}.get(role, role)
    return [
        when,
        kind,
        shown,
        str(len(lines)),
        _where(lines),
        f"{first.file}:{first.finding.number}: {first.finding.text}",
    ]


def _where(lines: Sequence[Line]) -> str:
    """Nodes, GPUs, NICs and ranks that the lines name."""
    named = []
    if nodes := {line.match.node for line in lines if line.match.node and "[" not in line.match.node}:
        named.append(compress(nodes))
    for name in ("gpu", "nic"):
        if found := sorted({str(value) for line in lines if (value := getattr(line.match, name))}):
            named.append(f"{name} {', '.join(found)}")
    if ranks := {line.match.rank for line in lines if line.match.rank is not None}:
        named.append("rank " + compress(f"r{rank}" for rank in ranks).removeprefix("r").strip("[]"))
    return "; ".join(named) or "-"


REPLAY_COLUMNS = ("attempt", "ended", "outcome", "done", "policy", "differs")


def as_row(one: Replayed) -> list[str]:
    """One line of the table."""
    differs = "yes" if one.differs else "" if one.done is not None else "?"
    return [str(one.attempt), show_time(one.ended), one.outcome, _done(one), _policy(one), differs]


def _done(one: Replayed) -> str:
    if one.done is None:
        return "nothing was decided"
    watched = "" if one.done.mode == "act" else f" (mode {one.done.mode}: not done)"
    return f"{one.done.action}{watched}: {one.done.reason}"


def _policy(one: Replayed) -> str:
    if one.goes_on:
        return "let the attempt go on"
    early = "" if one.gives_up_after is None else f"end it after {show_duration(one.gives_up_after)}, "
    assumed = "; which nodes there were is assumed" if one.assumed else ""
    return f"{early}{one.policy.action}: {one.policy.reason}{assumed}"


def replay_as_json(path: Path, settings: AegisSection, found: Sequence[Replayed]) -> dict[str, Any]:
    """The settings of the policy, and every attempt."""
    return {
        "events": str(path),
        "settings": settings.model_dump(mode="json"),
        "attempts": [
            {
                "attempt": one.attempt,
                "ended": one.ended,
                "outcome": one.outcome,
                "done": asdict(one.done) if one.done is not None else None,
                "policy": one.policy.fields(),
                "gives_up_after_s": one.gives_up_after,
                "goes_on": one.goes_on,
                "assumed": one.assumed,
                "differs": one.differs,
            }
            for one in found
        ],
    }

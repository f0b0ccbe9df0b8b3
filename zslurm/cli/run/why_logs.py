"""`zslurm why FILE...`: the diagnosis of a job's logs, as a table and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zslurm.aegis.logs import classify as logs
from zslurm.aegis.logs.classify import Diagnosis, Line
from zslurm.aegis.logs.lines import chunks_of
from zslurm.api.faults import existing
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import harmless, print_json
from zslurm.core.units import show_time
from zslurm.slurm.hostlist import compress, compress_ranges

_READ = 1 << 20

_COLUMNS = (
    Column("time", drop=2),
    Column("class"),
    Column("role", "state"),
    Column("lines", drop=3),
    Column("where", drop=1, most=30),
    Column("first line", "text"),
)


def explain_logs(files: Sequence[str], *, as_json: bool) -> None:
    """Print what went wrong by the logs of one job: the root cause, what followed from it, and the suspect.

    Raises:
        NotFound: there is no such file, or it is a directory.
    """
    for name in files:
        if name != "-":
            existing(name)
    classified = logs.classify(
        (name, _standard_input() if name == "-" else chunks_of(Path(name))) for name in files
    )
    if as_json:
        root = None if classified.root is None else _as_json(classified.root) | {"certain": classified.certain}
        print_json(
            {
                "lines": [_as_json(line) for line in classified.lines],
                "root": root,
                "suspect": asdict(classified.suspect),
                "advice": classified.advice,
                "left_out": classified.left_out,
            }
        )
        return
    _print_root(classified)
    if classified.lines:
        print()
        print_table(_COLUMNS, _rows(classified))


def _standard_input() -> Iterator[bytes]:
    yield from iter(lambda: sys.stdin.buffer.read(_READ), b"")


def _as_json(line: Line) -> dict[str, Any]:
    match = line.match
    return {
        "file": line.file,
        "number": line.finding.number,
        "class": match.kind,
        **{name: getattr(match, name) for name in ("role", "scope", "node", "gpu", "nic", "rank")},
        "time": line.finding.time,
        "line": line.finding.text,
    }


def _print_root(found: Diagnosis) -> None:
    """Print the root, its line and the advice; or that nothing was found."""
    root = found.root
    if root is None:
        print("no fault found" + (", only advisories:" if found.lines else ""))
        return
    uncertain = "" if found.certain else " (a consequence; its cause is not in these logs)"
    suspect = ", ".join(f"{name} {value}" for name, value in asdict(found.suspect).items() if value is not None)
    print(f"root: {root.match.kind}{uncertain}" + (f": {suspect}" if suspect else ""))
    print(harmless(f"  {root.file}:{root.finding.number}: {root.finding.text}"))
    print(f"  {found.advice}")


def _rows(found: Diagnosis) -> list[list[str]]:
    """Return the timeline: lines of one kind and role in one row, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found.lines:
        groups.setdefault((line.match.kind, line.match.role), []).append(line)
    return [_row(kind, role, lines, found.root) for (kind, role), lines in groups.items()]


def _row(kind: str, role: str, lines: list[Line], root: Line | None) -> list[str]:
    first = lines[0]
    when = show_time(first.when, "%m-%d %H:%M:%S") if first.when is not None else "-"
    shown = "root" if any(line is root for line in lines) else {"root": "later root"}.get(role, role)
    text = f"{first.file}:{first.finding.number}: {first.finding.text}"
    return [when, kind, shown, str(len(lines)), _where(lines), text]


def _where(lines: Sequence[Line]) -> str:
    """Return nodes, GPUs, NICs and ranks that the lines name."""
    named = []
    if nodes := {line.match.node for line in lines if line.match.node and "[" not in line.match.node}:
        named.append(compress(nodes))
    for name in ("gpu", "nic"):
        if values := sorted({str(value) for line in lines if (value := getattr(line.match, name))}):
            named.append(f"{name} {', '.join(values)}")
    if ranks := {line.match.rank for line in lines if line.match.rank is not None}:
        named.append(f"rank {compress_ranges(ranks)}")
    return "; ".join(named) or "-"

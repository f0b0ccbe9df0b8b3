"""`zslurm aegis classify`: the story of a job's logs, in words and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zslurm.aegis.logs.classify import Line, Story, classify
from zslurm.aegis.logs.lines import chunks_of
from zslurm.core.errors import NotFound
from zslurm.core.units import show_time
from zslurm.slurm.hostlist import compress

COLUMNS = ("time", "class", "role", "lines", "where", "first line")
_READ = 1 << 20


def story_of(files: Sequence[str]) -> Story:
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
    return classify((name, _standard_input() if name == "-" else chunks_of(Path(name))) for name in files)


def _standard_input() -> Iterator[bytes]:
    yield from iter(lambda: sys.stdin.buffer.read(_READ), b"")


def as_json(story: Story) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "lines": [_line_as_json(line) for line in story.lines],
        "root": None if story.root is None else _line_as_json(story.root) | {"certain": story.certain},
        "suspect": asdict(story.suspect),
        "advice": story.advice,
        "left_out": story.left_out,
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


def headline(story: Story) -> list[str]:
    """The root, its line and the advice; or that nothing was found."""
    root = story.root
    if root is None:
        return ["no fault found" + (", only advisories:" if story.lines else "")]
    kind = (
        root.match.kind if story.certain else f"{root.match.kind} (a consequence; its cause is not in these logs)"
    )
    place = ", ".join(f"{name} {value}" for name, value in asdict(story.suspect).items() if value is not None)
    return [
        f"root: {kind}" + (f": {place}" if place else ""),
        f"  {root.file}:{root.finding.number}: {root.finding.text}",
        f"  {story.advice}",
    ]


def rows(story: Story) -> list[list[str]]:
    """The timeline: lines that say the same in one row, in the order in which each was said first."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in story.lines:
        groups.setdefault((line.match.kind, line.match.role), []).append(line)
    return [_row(kind, role, lines, story.root) for (kind, role), lines in groups.items()]


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

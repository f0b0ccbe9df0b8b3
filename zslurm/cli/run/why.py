"""`zslurm why`: the cause of a run's death in one paragraph, and the next thing to do.

`zslurm why FILE...` diagnoses the logs of any job instead, as a table and as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from zslurm.aegis.fault_kinds import FAULT_RULES, FaultKind, rule_of
from zslurm.aegis.logs import classify as logs
from zslurm.aegis.logs.classify import Diagnosis, Line
from zslurm.aegis.logs.lines import chunks_of
from zslurm.aegis.logs.signatures import Signatures
from zslurm.api.faults import existing
from zslurm.cli.options import Json, complete_runs
from zslurm.cli.run.run_rows import note, time_left
from zslurm.cli.terminal.screen import columns_of_terminal, paragraph, print_styled
from zslurm.cli.terminal.table import HEAD, Column, print_table
from zslurm.core.console import harmless, print_json
from zslurm.core.errors import Exit
from zslurm.core.units import show_time
from zslurm.run.events import Decided
from zslurm.run.events.event import from_row
from zslurm.run.events.event_text import describe_cause
from zslurm.run.find import find
from zslurm.run.program_signals import NO_CHECKPOINTS
from zslurm.run.state.run_state import RunState, look_all
from zslurm.slurm.hostlist import compress, compress_ranges
from zslurm.slurm.reasons import explain

_CONTINUE = "`zslurm submit RUN_FILE` continues {where}"
_BY_STATE = {
    "cancelled": ("It was cancelled.", _CONTINUE),
    "interrupted": ("It was asked to save and stop.", _CONTINUE),
    "preempted": ("Slurm gave its nodes to another job.", _CONTINUE),
    "timeout": (
        "Slurm killed it at its time limit, before it had saved and stopped.",
        _CONTINUE + "; a longer `--time`, or a successor job, avoids it",
    ),
    "node-failed": (
        "Slurm ended the job because a node failed.",
        _CONTINUE + "; `zslurm doctor` checks the nodes",
    ),
    "out-of-memory": (
        "The kernel ended it because the job's memory was full.",
        "ask for more (`slurm.mem`) or use less: `zslurm plan memory RUN_FILE` shows what each rank takes",
    ),
    "lost": ("It ended without a record of how.", "`zslurm logs {run} --supervisor` has the job's last output"),
    "unknown": ("Its state cannot be found out now.", "ask again when Slurm answers"),
    "prepared": ("It was never accepted by a launcher.", "`zslurm submit RUN_FILE` starts it"),
}
"""What the state says by itself, and what to do."""
_OUTPUT = "`zslurm logs {run} --errors` shows the errors in its output, "


@dataclass(frozen=True)
class RunExplanation:
    """Why a run is in its state.

    Attributes:
        died: it has ended, and not as it should.
        kind: of the fault that is the root, if it is known.
        cause: the root in one line; empty if there is none.
        text: what happened, in sentences.
        advice: the next thing to do.
    """

    state: RunState
    died: bool
    kind: FaultKind | None
    cause: str
    text: str
    advice: str


def why(
    what: Annotated[
        list[str],
        Argument(
            metavar="RUN | FILE...",
            help="A run's name, its directory or a job id; or log files of one job, - for standard input.",
            autocompletion=complete_runs,
        ),
    ],
    json: Json = False,
) -> None:
    """Explain why a run died, by its record or by log files.

    A run gets one paragraph, with what to do next. Of log files the root cause, what followed from it, and the
    suspect are shown. They may be of any job, also packed: output of ranks and of srun, dmesg, journalctl, other
    trainers' logs.

    Example: zslurm why my-run

    Example: zslurm why slurm-4242.out dmesg.txt
    """
    if len(what) > 1 or what == ["-"] or Path(what[0]).is_file():
        explain_logs(what, as_json=json)
        return
    answer = explain_run(look_all([find(what[0])], cached=True)[0])
    if json:
        print_json(as_json(answer))
        return
    width = columns_of_terminal()
    print_styled([*paragraph(answer.text, width), *_next_lines(answer, width)])


def _next_lines(answer: RunExplanation, width: int | None) -> list[list[tuple[str, str]]]:
    if not answer.advice:
        return []
    first, *more = paragraph(answer.advice, width, indent=len("next: "))
    return [[("next: ", HEAD), (first[0][0].lstrip(), "")], *more]


def as_json(answer: RunExplanation) -> dict[str, Any]:
    """Return the answer as `--json` prints it."""
    state = answer.state
    return {
        "run": state.run.name,
        "state": state.state,
        "died": answer.died,
        "kind": answer.kind,
        "cause": state.cause or state.aegis.last_cause,
        "exit_code": state.exit_code,
        "text": answer.text,
        "next": answer.advice,
    }


def explain_run(state: RunState) -> RunExplanation:
    """Return why a run is in its state."""
    if state.state == "completed":
        done = " its steps" if state.step is not None else ""
        return RunExplanation(state, False, None, "", f"{state.run.name} did not die: it has completed{done}.", "")
    if state.state == "copied":
        return RunExplanation(state, False, None, "", f"{state.run.name} did not die: it is {note(state)}.", "")
    if state.active and state.state != "unknown":
        return _alive(state)
    cause = state.present_cause
    kind = _kind(state, cause)
    line = describe_cause(cause) if cause else ""
    simple, advice = _BY_STATE.get(state.state, ("", ""))
    sentences = [
        f"{state.run.name} {_ended(state)}.",
        simple,
        _because(line, kind),
        _decision(state),
        _saved(state),
    ]
    if cause:
        advice_of_kind = f"{rule_of(kind).advice} " if kind is not None else ""
        output = _OUTPUT if cause.get("rank") is not None else ""
        advice_of_kind = advice_of_kind.replace("{", "{{").replace("}", "}}")
        advice = f"{advice_of_kind}{output}{'then' if advice_of_kind else 'when it is fixed,'} {_CONTINUE}"
    text = " ".join(sentence for sentence in sentences if sentence)
    where = f"from step {state.checkpoint_step}" if state.checkpoint_step is not None else "it from the beginning"
    if state.not_shown and state.checkpoint_step is None:
        where = "it from what the program itself has saved"
    return RunExplanation(state, True, kind, line, text, advice.format(run=state.run.name, where=where))


def _alive(state: RunState) -> RunExplanation:
    """Return that a run has not died, and what it waits for or has survived."""
    sentences = [f"{state.run.name} has not died: it is {state.state}."]
    if text := note(state):
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    elif state.reason:
        sentences.append(explain(state.reason))
    if remaining := time_left(state):
        sentences.append(f"It is at step {state.step} of {state.total_steps}; {remaining} left.")
    if state.not_shown:
        sentences.append(f"Its program shows {'; '.join(state.not_shown)}.")
    return RunExplanation(state, False, None, "", " ".join(sentences), "")


def _ended(state: RunState) -> str:
    attempt = f" in attempt {state.attempt}" if state.attempt else ""
    of = f" of {state.total_steps}" if state.total_steps else ""
    step = f" at step {state.step}{of}" if state.step is not None else ""
    code = f" (exit code {state.exit_code})" if state.exit_code not in (None, Exit.INTERRUPTED) else ""
    words = {
        "failed": "has failed",
        "node-failed": "has ended",
        "out-of-memory": "has ended",
        "timeout": "has ended",
    }
    verb = words.get(state.state, f"is {state.state}")
    return f"{verb}{attempt}{step}{code}"


def _because(line: str, kind: FaultKind | None) -> str:
    if not line:
        return ""
    message = rule_of(kind).message if kind is not None else ""
    named = f" ({message})" if message.lower() not in line.lower() else ""
    return f"The root cause{named}: {line.rstrip('.')}."


def _decision(state: RunState) -> str:
    """Return what Aegis decided last, if that was an end and has a reason other than the cause."""
    decision = from_row(state.aegis.last_decision or {})
    if not isinstance(decision, Decided) or decision.action != "stop" or not decision.reason:
        return ""
    cause = str((state.cause or {}).get("message", ""))
    return (
        "" if cause and cause in decision.reason else f"Aegis stopped it for good: {decision.reason.rstrip('.')}."
    )


def _saved(state: RunState) -> str:
    if missing := next((clause for clause in state.not_shown if clause.startswith(NO_CHECKPOINTS)), None):
        return f"It shows {missing}."
    if state.checkpoint_step is None:
        return "No checkpoint was saved."
    return f"The newest checkpoint is that of step {state.checkpoint_step}."


def _kind(state: RunState, cause: dict[str, Any]) -> FaultKind | None:
    """Return the kind of the root: as Aegis recorded it, else by the line."""
    last = state.aegis.last_cause or {}
    recorded = str(last.get("kind", ""))
    if recorded in FAULT_RULES and cause and last.get("attempt") in (None, state.attempt):
        return FaultKind(recorded)
    match = Signatures.load().match(str(cause.get("message", ""))) if cause else None
    return match.kind if match is not None and match.role == "root" else None


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

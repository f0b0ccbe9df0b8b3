"""How one rank's program ended, as its rank records it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zslurm.core.errors import Exit
from zslurm.core.files import write_atomically
from zslurm.core.redact import redact
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.environment import task_node
from zslurm.train.stop import StopRequest

CHILD_KILLED = "ChildKilled"
"""The error in the record of a rank whose launcher reports that a signal ended one of its processes."""

_TAIL = 1 << 16
_PREFIX = r"(?:\[(?:rank\d+|[\w-]*\d+)\]: ?)?"
"""What torch puts before each line of a traceback (`[rank3]: `), or torchrun with --log-dir (`[default3]:`)."""
_TRACEBACK = re.compile(rf"^{_PREFIX}Traceback \(most recent call last\):$", re.MULTILINE)
_ERROR = re.compile(
    rf"^{_PREFIX}(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)):(?: (?P<message>.*))?$"
)
_OF_LAUNCHERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "SignalException"})
"""What torchrun and accelerate raise if one of their own processes has failed: that one has the cause."""
_ROOT_OF_TORCHRUN = re.compile(r"^Root Cause \(first observed failure\):\n\[0\]:\n((?:  .*\n?)+)", re.MULTILINE)
_KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID")
_FIELD = re.compile(r"^  (\w+) *: (.*)$", re.MULTILINE)


def error_in(log: str) -> dict[str, Any]:
    """Return error, message and traceback of the failure that a log ends with; nothing if there is none.

    Under torchrun it is the traceback of the process which failed first; else the last traceback. The launcher's
    own does not count while there is another one.
    """
    root = _torchrun_root(log)
    if root is not None and (killed := _KILLED.match(root.get("traceback", ""))) and killed[1] != "SIGTERM":
        rank = root.get("rank", "?").partition(" ")[0]
        return {"error": CHILD_KILLED, "message": f"rank {rank} of torchrun: {root['traceback']}"}
    errors = [error for text in _tracebacks(log) if (error := _error_of(text)) is not None]
    if root is not None:
        prefix = f"[rank{root.get('rank', '?').partition(' ')[0]}]"
        errors = [error for error in errors if error["traceback"].startswith(prefix)] or errors
    return errors[-1] if errors else {}


def _tracebacks(log: str) -> list[str]:
    starts = [match.start() for match in _TRACEBACK.finditer(log)]
    return [log[start:end] for start, end in zip(starts, [*starts[1:], len(log)], strict=False)]


def _error_of(text: str) -> dict[str, Any] | None:
    """Return what a traceback ends in; None for a launcher's, and if its end is missing."""
    # The first match: what is printed after the traceback may look like an error too.
    match = next((match for line in text.splitlines() if (match := _ERROR.match(line))), None)
    if match is None or (name := match["error"].rpartition(".")[2]) in _OF_LAUNCHERS:
        return None
    return {"error": name, "message": redact(match["message"] or "")[:2000], "traceback": redact(text)[-20000:]}


def _torchrun_root(log: str) -> dict[str, str] | None:
    """Return the fields of what torchrun reports of the process that failed first; None if it reports none.

    Source: torch/distributed/elastic/multiprocessing/errors/__init__.py, ChildFailedError.
    """
    match = _ROOT_OF_TORCHRUN.search(log)
    return None if match is None else dict(_FIELD.findall(match[1]))


def tail(log: Path) -> str:
    """Return the end of a log; binary output is no error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def record_end(attempt: AttemptDir, environ: Mapping[str, str], code: int, step: int, stop: StopRequest) -> int:
    """Record why the program ended, as far as that is known; returns the exit code of this rank.

    A rank that ended well leaves a record too: one without it has ended too early (early_exits.py of Aegis).
    If it failed without a traceback nothing is recorded: the signatures of its log then show more than its
    exit code, which srun reports.
    """
    body: dict[str, Any] = {}
    if stop.asked:
        # However it ends after the request, it was interrupted: programs exit with 0, a code, or by the signal.
        code = Exit.INTERRUPTED
        if stop.signal_name is not None:
            body["signal"] = stop.signal_name
    elif code != 0 and (code < 0 or not (body := error_in(tail(attempt.rank_log(int(environ["RANK"])))))):
        return code
    write_end(attempt, environ, code, step, **body)
    return code


def write_end(attempt: AttemptDir, environ: Mapping[str, str], code: int, step: int, **fields: Any) -> None:
    """Leave the record of a rank's end, if the file system takes it."""
    rank = int(environ["RANK"])
    body = {
        "rank": rank,
        "node": task_node(environ) or socket.gethostname(),
        "exit_code": code,
        "time": time.time(),
        "step": step,
        **fields,
    }
    with contextlib.suppress(OSError):
        write_atomically(attempt.rank_end(rank), json.dumps(body) + "\n")

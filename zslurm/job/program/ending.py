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
from zslurm.train.stop import StopRequest

_TAIL = 1 << 16
_PREFIX = r"(?:\[(?:rank\d+|[\w-]*\d+)\]: ?)?"
"""What torch puts before each line of a traceback (`[rank3]: `), or torchrun with --log-dir (`[default3]:`)."""
_TRACEBACK = re.compile(rf"^{_PREFIX}Traceback \(most recent call last\):$", re.MULTILINE)
_ERROR = re.compile(
    rf"^{_PREFIX}(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)):(?: (?P<message>.*))?$"
)
_OF_LAUNCHERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "SignalException"})
"""What torchrun and accelerate raise where one of their own processes has failed: that one has the cause."""
_ROOT_OF_TORCHRUN = re.compile(r"^Root Cause \(first observed failure\):\n\[0\]:\n((?:  .*\n?)+)", re.MULTILINE)
_FIELD = re.compile(r"^  (\w+) *: (.*)$", re.MULTILINE)


def error_in(log: str) -> dict[str, Any]:
    """Return error, message and traceback of the last traceback in a log; nothing where there is none.

    A launcher's own traceback does not count while there is another one.
    """
    starts = [found.start() for found in _TRACEBACK.finditer(log)]
    for start, end in zip(reversed(starts), [None, *reversed(starts)], strict=False):
        text = log[start:end]
        matches = [match for line in text.splitlines() if (match := _ERROR.match(line))]
        # Those of the same traceback: what is printed after it may look like an error too.
        if not matches or (name := matches[0]["error"].rpartition(".")[2]) in _OF_LAUNCHERS:
            continue
        message = redact(matches[0]["message"] or "")[:2000]
        return {"error": name, "message": message, "traceback": redact(text)[-20000:]}
    return {}


def torchrun_root(log: str) -> str | None:
    """Return what torchrun reports of the process that failed first, in a line; None where it reports none.

    Source: torch/distributed/elastic/multiprocessing/errors/__init__.py, ChildFailedError.
    """
    found = _ROOT_OF_TORCHRUN.search(log)
    if found is None:
        return None
    fields = dict(_FIELD.findall(found[1]))
    what, rank = fields.get("traceback", ""), fields.get("rank", "?").partition(" ")[0]
    how = what if what.startswith("Signal ") else f"exit code {fields.get('exitcode', '?').partition(' ')[0]}"
    return f"rank {rank} of torchrun ended first: {how}"


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

    Where it failed without a traceback nothing is recorded: the signatures of its log then show more than its exit
    code, which srun reports.
    """
    body: dict[str, Any] = {}
    if stop.asked:
        # However it ends after the request, it was interrupted: programs exit with 0, a code, or by the signal.
        code = Exit.INTERRUPTED
        if stop.signal_name is not None:
            body["signal"] = stop.signal_name
    elif code <= 0 or not (body := error_in(tail(attempt.rank_log(int(environ["RANK"]))))):
        return code
    write_end(attempt, environ, code, step, **body)
    return code


def write_end(attempt: AttemptDir, environ: Mapping[str, str], code: int, step: int, **fields: Any) -> None:
    """Leave the record of a rank's end, where the file system takes it."""
    rank = int(environ["RANK"])
    body = {
        "rank": rank,
        "node": environ.get("SLURMD_NODENAME", socket.gethostname()),
        "exit_code": code,
        "time": time.time(),
        "step": step,
        **fields,
    }
    with contextlib.suppress(OSError):
        write_atomically(attempt.rank_end(rank), json.dumps(body) + "\n")

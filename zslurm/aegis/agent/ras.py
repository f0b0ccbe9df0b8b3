"""Asks the RAS service of NCCL, from 2.24 on, who lags: every process of a job answers for all of them.

The exchange is lines of text over TCP, at NCCL_RAS_ADDR, by default port 28028 of this machine:

    CLIENT PROTOCOL 2   ->   SERVER PROTOCOL n
    TIMEOUT seconds     ->   OK                   seconds that the processes get to answer each other
    SET FORMAT json     ->   OK                   from 2.28 on; older ones refuse it
    VERBOSE STATUS      ->   the state of the job, to the end of the connection

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html. As JSON it has, for each
communicator, the number of each collective that each rank has called, and the ranks that do not answer: who has
called fewer than the others is behind. The text of older versions is for people; its errors and warnings are
passed on.

If nothing listens (gloo, RCCL without the service, NCCL_RAS_ENABLE=0) there is no answer: that is no problem.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.sensors.progress import records
from zslurm.checkpoint_tools.quantities import counted
from zslurm.run.run_dir import AttemptDir

PORT = 28028
_PROTOCOL = 2
_CONNECT_S, _COLLECT_S, _MORE_S = 1.0, 4, 4.0
"""Seconds to connect; that the processes get for each other; and further ones for the whole answer."""
_MOST_BYTES = 64 << 20
_MOST_LINES = 8
_MOST_RANKS = 64


@dataclass(frozen=True)
class RasAnswer:
    """What the service knows.

    Attributes:
        there: whether a service of this run answered.
        version: of the library; empty if it does not show it.
        found: what is wrong, a line each.
        behind: ranks that have called fewer collectives than others, or do not answer.
    """

    there: bool = False
    version: str = ""
    found: tuple[str, ...] = ()
    behind: tuple[int, ...] = ()

    def values(self) -> dict[str, Any]:
        """Return it as values of an agent's answer."""
        return {
            "there": self.there, "version": self.version, "found": list(self.found), "behind": list(self.behind),
        }  # fmt: skip


def ask_ras(context: NodeContext, attempt: AttemptDir) -> RasAnswer:
    """Ask the service on this node; an empty answer if there is none, or if it is another job's."""
    if context.environ.get("NCCL_RAS_ENABLE") == "0":
        return RasAnswer()
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        pids = {record.pid for record in records(attempt.progress(context.environ))}
    try:
        text = query(*_address(context.environ.get("NCCL_RAS_ADDR", "")))
    except (OSError, ValueError):
        return RasAnswer()
    return answer_of(text, pids)


def _address(text: str) -> tuple[str, int]:
    """Return host and port of NCCL_RAS_ADDR: `host:port` or `[address]:port`.

    Raises:
        ValueError: it is neither.
    """
    if not text:
        return "localhost", PORT
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "localhost", int(port)


def query(host: str, port: int) -> str:
    """Return the state of the job as the service describes it, as JSON if it can.

    Raises:
        OSError: there is none, or it did not answer in time.
        ValueError: it is another service.
    """
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        connection.settimeout(_COLLECT_S + _MORE_S)
        with connection.makefile("rwb") as lines:
            if not _ask(lines, f"CLIENT PROTOCOL {_PROTOCOL}").startswith("SERVER PROTOCOL "):
                raise ValueError("no RAS service")
            _ask(lines, f"TIMEOUT {_COLLECT_S}")
            _ask(lines, "SET FORMAT json")
            lines.write(b"VERBOSE STATUS\n")
            lines.flush()
            return lines.read(_MOST_BYTES).decode("utf-8", errors="replace")


def _ask(lines: Any, request: str) -> str:
    lines.write(request.encode() + b"\n")
    lines.flush()
    line: bytes = lines.readline(4096)
    if not line:
        raise ConnectionError("the RAS service hung up")
    return line.decode("utf-8", errors="replace").strip()


def answer_of(text: str, pids: Collection[int]) -> RasAnswer:
    """Return what an answer shows; `pids` are this node's ranks, one of which must be in it if it names any."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return RasAnswer(there=True, found=tuple(_complaints(text)[:_MOST_LINES])) if text.strip() else RasAnswer()
    communicators = body.get("communicators") if isinstance(body, dict) else None
    if not isinstance(communicators, list) or not communicators:
        return RasAnswer()
    largest = max(
        (c for c in communicators if isinstance(c, dict)), key=lambda c: int(c.get("size", 0)), default={}
    )
    ranks, missing = largest.get("ranks", []), largest.get("missing_ranks", [])
    if pids and not {row.get("pid") for row in (*ranks, *missing)}.intersection(pids):
        return RasAnswer()  # the port is another job's
    lines, behind = [], set()
    for row in missing:
        behind.add(int(row["rank"]))
        how = "is dead" if row.get("status", {}).get("considered_dead") else "does not answer"
        lines.append(f"rank {row['rank']} {how} (process {row.get('pid')} on {row.get('host')})")
    for rank, line in _lagging(ranks):
        behind.add(rank)
        lines.append(line)
    return RasAnswer(
        True, str(body.get("nccl_version", "")), tuple(lines[:_MOST_LINES]), tuple(sorted(behind)[:_MOST_RANKS])
    )


def _lagging(ranks: Collection[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the ranks that have called fewer collectives of some kind than the rank with most of them."""
    counts = {int(row["rank"]): row.get("collective_counts", {}) for row in ranks}
    most: dict[str, int] = {}
    for calls in counts.values():
        for kind, number in calls.items():
            most[kind] = max(most.get(kind, 0), int(number))
    for rank, calls in sorted(counts.items()):
        fewer = {kind: number - int(calls.get(kind, 0)) for kind, number in most.items()}
        if kind := max((kind for kind in fewer if fewer[kind] > 0), key=lambda kind: fewer[kind], default=""):
            yield rank, f"rank {rank} has called {counted(fewer[kind], kind)} fewer than others"


def _complaints(text: str) -> list[str]:
    """Return the lines of the sections Errors and Warnings of an answer for people."""
    complaints: list[str] = []
    inside = False
    for line in text.splitlines():
        word = line.strip()
        if word in ("Errors", "Warnings"):
            inside = True
        elif inside and word and set(word) != {"="}:
            complaints.append(word)
    return complaints
